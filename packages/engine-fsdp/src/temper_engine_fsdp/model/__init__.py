"""The Hugging Face model with packed attention, sequence parallelism and output heads."""
