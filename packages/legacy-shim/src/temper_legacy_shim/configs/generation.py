"""Offline generation: prompts in, completions out."""

from temper_legacy_shim.configs.draft import Draft


def build_generation(draft: Draft) -> None:
    """Task generate."""
    draft.find("person", "generation", "generation is not translated yet.")
