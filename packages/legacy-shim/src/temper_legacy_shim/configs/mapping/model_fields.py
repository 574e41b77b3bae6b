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
"""Fields of the computation, which do not change the model."""
_TEMPLATE = "data.apply_chat_template_kwargs"


def find_model_fields(draft: Draft) -> None:
    """Report a question for each field that changes the model, which nothing here reads."""
    for key in draft.old.origin:
        result = _FIELD.fullmatch(key)
        if result is None or result["field"] in _OF_THE_MACHINE or draft.old.get(key) in NEUTRAL:
            continue
        if result["field"] == _POSITIONS:
            _find_positions(draft, key)
            continue
        draft.find("override-config", key, value=draft.old.get(key))


def _find_positions(draft: Draft, key: str) -> None:
    """Report a question if the model's limit is known to be too low for the run's samples, else a note."""
    lengths = (draft.integer("data.max_prompt_length"), draft.integer("data.max_response_length"))
    longest = sum(length for length in lengths if length is not None)
    limit = config_json(draft.text("actor_rollout_ref.model.path")).get(_POSITIONS)
    if isinstance(limit, int) and limit < longest:
        draft.find("override-positions", key, value=draft.old.get(key), limit=limit, longest=longest)


def find_template_arguments(draft: Draft) -> None:
    """Report a question for arguments of the chat template: False changes a prompt as True does."""
    arguments = draft.old.get(_TEMPLATE)
    if not isinstance(arguments, dict) or not arguments:
        return
    for name, value in arguments.items():
        draft.find("chat-template-kwargs", f"{_TEMPLATE}.{name}", name=name, value=value)


def config_json(model: str) -> dict[str, object]:
    """Return the config.json of a local model folder; empty if there is none that can be read."""
    if not model:
        return {}
    try:
        file = Path(os.path.expandvars(model)).expanduser() / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RuntimeError):  # no name of a file here, or damaged: temper-train --check says so
        return {}
    return fields if isinstance(fields, dict) else {}
