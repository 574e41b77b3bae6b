"""Process groups, host memory, numerics and measurements."""
