"""Advantages: the estimators, and how a step's rewards become a number per token."""
