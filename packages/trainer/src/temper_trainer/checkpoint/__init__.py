"""A run on disk: one transaction over every role and the trainer's own state, and the model for others to use."""
