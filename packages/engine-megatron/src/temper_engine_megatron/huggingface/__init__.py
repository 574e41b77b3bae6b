"""Hugging Face models: configuration, initial weights and names."""
