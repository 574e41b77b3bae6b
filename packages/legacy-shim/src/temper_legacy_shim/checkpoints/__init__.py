"""Checkpoints of older systems: lazily readable, convertible, never executed."""
