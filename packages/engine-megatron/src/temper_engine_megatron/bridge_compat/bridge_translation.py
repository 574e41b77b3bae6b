"""A Hugging Face architecture in Megatron's words: its configuration, and what each of Megatron's parameters is made of."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from temper_engine_api.errors import CapabilityError
from temper_engine_megatron.bridge_compat.bridge_import import import_bridge
from temper_engine_megatron.bridge_compat.supported_versions import find_installed_pair

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
"""Model types whose log-probs and gradients are compared with those of transformers. The bridge translates more, whose own classes then do
what this engine would leave out: Gemma's scales the embedding."""
USE_ANOTHER = f"use a {', '.join(SUPPORTED_MODEL_TYPES[:-1])} or {SUPPORTED_MODEL_TYPES[-1]} model."

MappingKind = Literal["plain", "qkv", "gated", "experts_a", "experts_b", "gated_experts_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """What one of Megatron's parameters is made of."""

    kind: MappingKind
    """plain: one tensor. qkv: query, key and value, interleaved by group of heads. gated: gate and up, one above the other.
    experts_a, experts_b: a low-rank adapter's A or B of every expert in PEFT's order, see ``adapter_experts``; gated where B's rows are."""
    names: tuple[str, ...]
    """Hugging Face names in the order that the kind says."""


class BridgeTranslation:
    """A Hugging Face architecture in Megatron's words."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        """Find the translation.

        Raises:
            ConfigError: Megatron-Bridge is missing, or of a line that is not known.
            CapabilityError: the architecture is not one of those that are known.
        """
        bridge = import_bridge()
        described = _as_causal_lm(hf_config)
        auto = bridge.AutoBridge.from_hf_config(described)
        self.settings: Any = auto.to_megatron_provider(load_weights=False)
        self._registry = (
            _model_bridge()
            .get_model_bridge(getattr(transformers, described.architectures[0]))
            .mapping_registry()
        )

    def find_mapping(self, name: str) -> WeightMapping:
        """Of a parameter by Megatron's name with the layer's global number.

        Raises:
            CapabilityError: the bridge does not know it.
        """
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            raise CapabilityError(
                f"Megatron-Bridge does not say what {name} is made of: this architecture is not supported."
            )
        parts: str | Mapping[str, str] = mapping.hf_param
        if isinstance(parts, str):
            return WeightMapping(kind="plain", names=(parts,))
        if parts.keys() == {"q", "k", "v"}:
            return WeightMapping(kind="qkv", names=(parts["q"], parts["k"], parts["v"]))
        if parts.keys() == {"gate", "up"}:
            return WeightMapping(kind="gated", names=(parts["gate"], parts["up"]))
        raise CapabilityError(
            f"{name} is made of {sorted(parts)}, which this engine can't put together: {USE_ANOTHER}"
        )

    def join_qkv(self, parts: Sequence[Tensor]) -> Tensor:
        """Query, key and value as Megatron's interleaved tensor, full size."""
        conversion = _param_mapping()
        join = conversion.merge_qkv_weights if parts[0].ndim > 1 else conversion.merge_qkv_biases
        joined: Tensor = join(self.settings, *parts)
        return joined

    def split_qkv(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The reverse."""
        conversion = _param_mapping()
        split = conversion.split_qkv_weights if tensor.ndim > 1 else conversion.split_qkv_biases
        return tuple(split(self.settings, tensor))


def _as_causal_lm(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The bridge finds a translation by the name of the class with a language-model head, whatever head a model has."""
    described = copy.deepcopy(hf_config)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if name is None or hf_config.model_type not in SUPPORTED_MODEL_TYPES:
        raise CapabilityError(
            f"the Megatron engine does not know {name or type(hf_config).__name__}, and might leave out parts of it without an error: "
            f"{USE_ANOTHER}"
        )
    described.architectures = [name]
    rotary: Mapping[str, object] = described.to_dict().get("rope_parameters") or {}
    if find_installed_pair().ignores_rope_parameters and "rope_theta" in rotary:
        described.rope_theta = rotary["rope_theta"]
    return described


def _model_bridge() -> Any:
    from megatron.bridge.models.conversion import model_bridge

    return model_bridge


def _param_mapping() -> Any:
    from megatron.bridge.models.conversion import param_mapping

    return param_mapping
