"""Measurements that need a CUDA host; run by hand from the root of the repository."""
