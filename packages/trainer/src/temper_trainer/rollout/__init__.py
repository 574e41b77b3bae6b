"""Prompts in, completions out, under a numbered set of weights. Import from the submodules."""
