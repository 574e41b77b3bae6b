"""A numbered set of weights, from the actor's engine to a sampler: buckets with checksums, a version, a canary."""
