"""Angles of rotary position embeddings, as transformers computes them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from temper_engine_api.errors import CapabilityError, ConfigError

_WITHOUT_ROTATION = frozenset({"nemotron_h"})
"""Model types without rotary embeddings; an angle of 0 does not change queries and keys."""


def compute_rotary_frequencies(hf_config: PretrainedConfig) -> tuple[Tensor, float]:
    """Return [D / 2] float32 angles per position, and a factor of rotated queries and keys.

    D is the number of dimensions of a head that rotate. A model with other angles in layers of
    another kind has [kinds, D / 2], in the order of `list_rotary_kinds`.

    Raises:
        ConfigError: If transformers does not know the type of the embeddings.
        CapabilityError: If the engine does not support it.
    """
    if hf_config.model_type in _WITHOUT_ROTATION:
        return torch.zeros(_get_head_dim(hf_config) // 2), 1.0
    kinds = list_rotary_kinds(hf_config)
    if kinds is None:
        return _compute_kind(hf_config, dict(hf_config.rope_parameters))
    computed = [
        _compute_kind(hf_config, dict(hf_config.rope_parameters[kind]), layer_type=kind)
        for kind in kinds
    ]
    frequencies, scales = zip(*computed, strict=True)
    if set(scales) != {1.0}:
        raise CapabilityError(
            "the model scales attention in layers of one kind only, which the Megatron engine does "
            "not support: use the FSDP engine."
        )
    return torch.stack(frequencies), 1.0


def list_rotary_kinds(hf_config: PretrainedConfig) -> list[str] | None:
    """Return the kinds of layers that have angles of their own; None if all have the same."""
    if hf_config.model_type in _WITHOUT_ROTATION:
        return None
    is_nested = all(isinstance(value, Mapping) for value in hf_config.rope_parameters.values())
    return sorted(set(hf_config.layer_types)) if is_nested else None


def _compute_kind(
    hf_config: PretrainedConfig, rope: Mapping[str, Any], **layer_type: str
) -> tuple[Tensor, float]:
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        dim = int(_get_head_dim(hf_config) * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return torch.reciprocal(torch.pow(float(rope["rope_theta"]), exponents)), 1.0
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"the model's rope_type is {rope_type!r}, which this version of transformers does not "
            f"have: use a newer one, or one of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}."
        )
    frequencies: Tensor
    # On the CPU, so that all devices get the same values.
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](
        hf_config, torch.device("cpu"), **layer_type
    )
    if rope_type in ("dynamic", "longrope"):
        raise CapabilityError(
            f"rope_type {rope_type!r} depends on the length of a sequence, which the Megatron "
            "engine does not support: use the FSDP engine."
        )
    return frequencies, scale


def _get_head_dim(hf_config: PretrainedConfig) -> int:
    if _rotates_latents(hf_config):
        return int(hf_config.qk_rope_head_dim)
    head_dim: int | None = getattr(hf_config, "head_dim", None)
    return head_dim or hf_config.hidden_size // hf_config.num_attention_heads


def _rotates_latents(hf_config: PretrainedConfig) -> bool:
    """Return True for latent attention, in which only a part of each head rotates."""
    return "kv_lora_rank" in hf_config.to_dict()
