"""Batching: rollouts become samples, and samples become packed batches for each rank."""
