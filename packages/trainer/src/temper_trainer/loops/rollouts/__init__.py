"""Scheduling of rollouts: sampling, turns, batches and their staleness."""
