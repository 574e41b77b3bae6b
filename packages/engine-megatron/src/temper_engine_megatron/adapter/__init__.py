"""LoRA: what is adapted, and the layers that compute it."""
