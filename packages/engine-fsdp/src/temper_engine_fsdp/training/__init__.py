"""Micro-batches, optimizers and the LoRA adapter."""
