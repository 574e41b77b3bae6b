"""What a policy may act in: tools that answer between two completions of a rollout. Tokens go in and tokens come out."""
