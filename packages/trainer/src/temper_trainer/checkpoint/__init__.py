"""Checkpoints of a run: save, resume, delete old ones, and export a Hugging Face model."""
