"""Saving and loading checkpoints."""
