"""Sharded weights and optimizer states, and the LoRA adapter, as full tensors."""
