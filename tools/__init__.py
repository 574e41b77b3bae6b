"""Tools of this repository: its environment, checks, benchmarks on GPUs and releases."""
