"""Everything that depends on the version of Megatron-Bridge or Megatron-Core.

The only package that imports Megatron-Bridge. It turns a Hugging Face config into Megatron's
transformer config, and maps each of Megatron's parameters to Hugging Face weights.
"""

from temper_engine_megatron.bridge_compat.bridge_translation import (
    TESTED_MODEL_TYPES,
    BridgeTranslation,
    MappingKind,
    WeightMapping,
    is_expert_stack,
)
from temper_engine_megatron.bridge_compat.supported_versions import (
    VERSION_PAIRS,
    VersionPair,
    find_installed_pair,
    get_mlp_submodules,
    replace_experts,
)

__all__ = [
    "TESTED_MODEL_TYPES",
    "VERSION_PAIRS",
    "BridgeTranslation",
    "MappingKind",
    "VersionPair",
    "WeightMapping",
    "find_installed_pair",
    "get_mlp_submodules",
    "is_expert_stack",
    "replace_experts",
]
