"""Megatron-Bridge, imported in this room and nowhere else, with everything that depends on its version or on Megatron-Core's.

In: a Hugging Face configuration. Out: a Megatron configuration, and for each of Megatron's parameters what it is made of.
``lines`` says which versions belong together and what is different in each; ``stand_ins`` imports them without what they need not have.
"""

from temper_engine_megatron.bridge_compat.bridge_translation import (
    BridgeTranslation,
    MappingKind,
    WeightMapping,
)
from temper_engine_megatron.bridge_compat.supported_versions import (
    VERSION_PAIRS,
    VersionPair,
    find_installed_pair,
    get_expert_submodules,
)

__all__ = [
    "VERSION_PAIRS",
    "BridgeTranslation",
    "MappingKind",
    "VersionPair",
    "WeightMapping",
    "find_installed_pair",
    "get_expert_submodules",
]
