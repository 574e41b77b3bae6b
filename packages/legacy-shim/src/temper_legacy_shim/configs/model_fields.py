"""Fields of the model's config.json that the old system set from its configuration: another model, unless they say nothing new."""

import re

from temper_legacy_shim.configs.draft import Draft
from temper_legacy_shim.configs.values import Plain

NEUTRAL: tuple[Plain, ...] = (None, False, 0, "", [], {})
"""Values that switch nothing on."""

_FIELD = re.compile(r"(actor_rollout_ref\.model|critic\.model|model)\.override_config\.(model_config\.)?(?P<field>.+)")
_OF_THE_MACHINE = ("attn_implementation", "max_position_embeddings", "use_cache", "torch_dtype")
"""How it is computed, and up to which position: not which model it is."""


def find_model_fields(draft: Draft) -> None:
    """Ask a person about each one that makes another model; nothing here reads it, and a smaller model would become the whole one."""
    for key in draft.old.origin:
        found = _FIELD.fullmatch(key)
        if found is None or found["field"] in _OF_THE_MACHINE or draft.old.get(key) in NEUTRAL:
            continue
        draft.find(
            "person",
            "override-config",
            f"{key}={draft.old.get(key)} changes the model itself, and nothing here does that: write it into the config.json beside the "
            "weights (in a copy of that folder), and take the key out.",
            key,
        )
