"""Score completions: reward functions, reward models and shaping. Import from the submodules."""
