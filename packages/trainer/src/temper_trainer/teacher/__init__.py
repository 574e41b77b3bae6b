"""Log-probs of completions under frozen teacher models, for distillation."""
