"""Publish the weights of the actor's engine to a sampler under a version number."""
