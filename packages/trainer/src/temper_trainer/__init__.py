"""Drive a post-training run: data, rollouts, rewards, algorithms, weight sync and checkpoints."""
