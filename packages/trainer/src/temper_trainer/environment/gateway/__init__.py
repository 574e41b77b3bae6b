"""An OpenAI-compatible endpoint in front of the sampler, for agents whose code is not changed."""
