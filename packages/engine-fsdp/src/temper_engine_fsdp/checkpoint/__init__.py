"""Checkpoints, and weights under Hugging Face names."""
