"""What is optimised: advantages, objectives, KL, and how they are aggregated. Pure functions of tensors; nothing here runs a model."""
