"""Fields of the model's config.json, and arguments of its chat template, that the old system took from its configuration."""

import json
import os
import re
from pathlib import Path

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.reading.config_values import Plain

NEUTRAL: tuple[Plain, ...] = (None, False, 0, "", [], {})
"""Values that switch nothing on."""

_FIELD = re.compile(r"(actor_rollout_ref\.model|critic\.model|model)\.override_config\.(model_config\.)?(?P<field>.+)")
_POSITIONS = "max_position_embeddings"
_OF_THE_MACHINE = ("attn_implementation", "use_cache", "torch_dtype")
"""How it is computed: not which model it is."""
_TEMPLATE = "data.apply_chat_template_kwargs"


def find_model_fields(draft: Draft) -> None:
    """Ask about each field that makes another model: nothing here reads it, and a smaller model would become the complete one."""
    for key in draft.old.origin:
        found = _FIELD.fullmatch(key)
        if found is None or found["field"] in _OF_THE_MACHINE or draft.old.get(key) in NEUTRAL:
            continue
        if found["field"] == _POSITIONS:
            _find_positions(draft, key)
            continue
        draft.find("override-config", key, value=draft.old.get(key))


def _find_positions(draft: Draft, key: str) -> None:
    """Ask where the model's own limit is known to be too low for the run's samples; otherwise say who checks it."""
    lengths = (draft.integer("data.max_prompt_length"), draft.integer("data.max_response_length"))
    longest = sum(length for length in lengths if length is not None)
    limit = config_json(draft.text("actor_rollout_ref.model.path")).get(_POSITIONS)
    if isinstance(limit, int) and limit < longest:
        draft.find("override-positions", key, value=draft.old.get(key), limit=limit, longest=longest)


def find_template_arguments(draft: Draft) -> None:
    """Ask about arguments of the chat template: False changes a prompt as well as True does."""
    arguments = draft.old.get(_TEMPLATE)
    if not isinstance(arguments, dict) or not arguments:
        return
    for name, value in arguments.items():
        draft.find("chat-template-kwargs", f"{_TEMPLATE}.{name}", name=name, value=value)


def config_json(model: str) -> dict[str, object]:
    """Return the config.json of a local model folder; empty where there is none that can be read."""
    if not model:
        return {}
    try:
        file = Path(os.path.expandvars(model)).expanduser() / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RuntimeError):  # no name of a file here, or damaged: temper-train --check says so
        return {}
    return fields if isinstance(fields, dict) else {}
