"""Advantage estimators, policy losses, KL and value losses: pure functions of tensors."""
