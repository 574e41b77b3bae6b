"""Measurements that need a CUDA machine; run there by hand, from the repository's root."""
