"""Samplers: complete prompts with a numbered set of weights. Import from the submodules."""
