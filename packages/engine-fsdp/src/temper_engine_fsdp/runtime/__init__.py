"""Process groups, host memory, numerics and measurements: what the engine needs around the model."""
