"""Batching: rollouts become samples, and samples become the packed batches of each rank."""
