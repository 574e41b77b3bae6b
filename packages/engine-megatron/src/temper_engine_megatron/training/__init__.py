"""Passes over micro-batches, and the optimizer."""
