"""Objectives: the losses per token and their weights, which an engine reduces in its update."""
