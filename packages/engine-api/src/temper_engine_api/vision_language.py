"""Vision-language models, whose text part is trained while the encoder of images stays as it is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

VISION_LANGUAGE_TYPES = frozenset(
    {"gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
)
"""Values of `model_type` for models with an encoder of images and a text part to train."""

IMAGE_PROCESSOR_FILES = (
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that prepare images for the encoder; a saved model needs them next to its weights."""

_MODEL, _TEXT_PART = "model", "language_model"


def has_image_encoder(model_type: str) -> bool:
    """Return True if a model has an encoder of images and a text part that engines may train.

    Build it with transformers' `AutoModelForImageTextToText`. `AutoModelForCausalLM` would load the
    text part of some alone, and their exported weights would lack the encoder.
    """
    return model_type in VISION_LANGUAGE_TYPES


def list_encoder_modules(model: "nn.Module", *, model_type: str) -> list[str]:
    """Return the names of the modules that text does not reach, such as `model.visual`.

    Args:
        model: Model of transformers with its output head.
        model_type: Type from its config.
    """
    if not has_image_encoder(model_type):
        return []
    children = model.get_submodule(_MODEL).named_children()
    return [f"{_MODEL}.{name}" for name, _ in children if name != _TEXT_PART]
