"""Megatron-Bridge, imported in this room and nowhere else, with everything that depends on its version or on Megatron-Core's.

In: a Hugging Face configuration. Out: a Megatron configuration, and for each of Megatron's parameters what it is made of.
``lines`` says which versions belong together and what is different in each; ``stand_ins`` imports them without what they need not have.
"""

from temper_engine_megatron.bridge_compat.lines import (
    LINES,
    Line,
    line_in_use,
    submodules_of_experts,
)
from temper_engine_megatron.bridge_compat.translation import ParameterKind, Recipe, Translation

__all__ = [
    "LINES",
    "Line",
    "ParameterKind",
    "Recipe",
    "Translation",
    "line_in_use",
    "submodules_of_experts",
]
