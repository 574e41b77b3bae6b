"""The driver of a post-training run: data, rollout, reward, algorithms, batching, weight sync, runtime and loops."""
