"""Whether a model's config.json describes one that sees or listens, which no engine trains."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

_PARTS = re.compile(
    r"(vision|visual|audio|speech|image|video|vit|vq)_(config|tower|encoder|backbone|model)|visual|(mm_vision|mm_audio)_tower"
)
"""Blocks that describe an encoder of images, video or sound."""
_OTHER_PARTS = (
    "thinker_config",
    "talker_config",
    "img_processor",
    "audio_processor",
    "num_mel_bins",
)
_CLASSES = re.compile(
    r"VL(?![a-z])|VLM|Vision|Audio|Speech|Image|Video|Omni|Multimodal|Llava|Whisper|MiniCPM[VO]$"
)
_TYPES = re.compile(
    r"(?<![a-z])vl(?![a-z])|qwen_?vl|internvl|llava|omni|whisper|minicpm[vo]$|\dv(?![a-z])"
)


def image_part(model: Path) -> str:
    """What in a folder's config.json says that its model sees or listens; empty where nothing does.

    A file that cannot be read says nothing here: loading the model refuses it with its own sentence.
    """
    try:
        fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return _part(fields) if isinstance(fields, dict) else ""


def _part(fields: Mapping[str, object]) -> str:
    for key, value in fields.items():
        if value and (_PARTS.fullmatch(key) or key in _OTHER_PARTS):
            return key
    model_type = str(fields.get("model_type", ""))
    if _TYPES.search(model_type):
        return f"model_type {model_type}"
    classes = fields.get("architectures")
    for name in map(str, classes if isinstance(classes, list) else ()):
        if _CLASSES.search(name) or (
            name.endswith("ForConditionalGeneration") and "text_config" in fields
        ):
            return name
    return ""
