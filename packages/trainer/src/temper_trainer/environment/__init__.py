"""Environments that a policy acts in, such as tools that answer between two completions."""
