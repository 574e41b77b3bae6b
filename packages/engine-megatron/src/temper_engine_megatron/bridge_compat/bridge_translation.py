"""Translate a Hugging Face architecture to Megatron with Megatron-Bridge."""

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

SUPPORTED_MODEL_TYPES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "llama",
    "mistral",
)
"""Model types whose log-probs and gradients are tested against transformers.

The bridge translates more, but with model classes that do what this engine would leave out, such as
Gemma's scaled embedding."""
_USE_SUPPORTED = (
    f"use a {', '.join(SUPPORTED_MODEL_TYPES[:-1])} or {SUPPORTED_MODEL_TYPES[-1]} model."
)

_HYBRID = "layers with linear attention over packed sequences"
MISSING_COMPONENTS: Mapping[str, str] = {
    "gpt_oss": "attention with sinks and alternating windows, and biases in experts",
    "gemma2": "soft-capped attention, windows, norms after sublayers and scaled embeddings",
    "gemma3_text": "alternating windows, norms after sublayers and scaled embeddings",
    "qwen3_next": f"{_HYBRID}, and shared experts",
    "qwen3_5_text": f"{_HYBRID}, and a translation by Megatron-Bridge",
    "qwen3_5_moe_text": f"{_HYBRID}, shared experts and a translation by Megatron-Bridge",
    "nemotron_h": "Mamba layers over packed sequences, for which Megatron-Core needs mamba-ssm",
    "cohere": "LayerNorm, attention parallel to the MLP, and a factor of the logits",
}
"""Components that this engine lacks for families that the FSDP engine supports, by model type."""

MappingKind = Literal["plain", "qkv", "gated", "experts_a", "experts_b", "gated_experts_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """Hugging Face weights that one Megatron parameter consists of."""

    kind: MappingKind
    """The way they are combined.

    - plain: a single tensor.
    - qkv: query, key and value, interleaved by group of heads.
    - gated: gate above up.
    - experts_a, experts_b, gated_experts_b: LoRA A or B of all experts in PEFT's order; see
      `adapter.expert_adapters`."""
    names: tuple[str, ...]
    """Hugging Face names, in the order of the kind."""


class BridgeTranslation:
    """Megatron's transformer config and weight mappings of a Hugging Face architecture."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        """Find Megatron-Bridge's config and weight mappings for this architecture.

        Raises:
            ConfigError: If Megatron-Bridge is missing or of an unsupported version.
            CapabilityError: If the architecture is not supported.
        """
        bridge = import_bridge()
        causal_lm_config = _to_causal_lm_config(hf_config)
        if causal_lm_config.architectures[0] not in bridge.AutoBridge.list_supported_models():
            _register_own_bridges()
        auto_bridge = bridge.AutoBridge.from_hf_config(causal_lm_config)
        self.transformer_config: Any = auto_bridge.to_megatron_provider(load_weights=False)
        """Megatron's transformer config; the caller adds the settings of the run."""
        self._mapping_registry = (
            _import_model_bridge()
            .get_model_bridge(getattr(transformers, causal_lm_config.architectures[0]))
            .mapping_registry()
        )

    def find_mapping(self, name: str) -> WeightMapping:
        """Return the mapping of a parameter by Megatron name, with the global layer number.

        Raises:
            CapabilityError: If the bridge does not know the parameter.
        """
        mapping = self._mapping_registry.megatron_to_hf_lookup(name)
        if mapping is None and ".local_experts." in name:
            # Some bridges know only the experts of TransformerEngine, numbered at the end.
            mapping = self._mapping_registry.megatron_to_hf_lookup(_to_grouped_name(name))
        if mapping is None:
            raise CapabilityError(
                f"Megatron-Bridge has no mapping for {name}, so this architecture is not "
                f"supported: {_USE_SUPPORTED}"
            )
        hf_names: str | Mapping[str, str] = mapping.hf_param
        if isinstance(hf_names, str):
            return WeightMapping(kind="plain", names=(hf_names,))
        if hf_names.keys() == {"q", "k", "v"}:
            return WeightMapping(kind="qkv", names=(hf_names["q"], hf_names["k"], hf_names["v"]))
        if hf_names.keys() == {"gate", "up"}:
            return WeightMapping(kind="gated", names=(hf_names["gate"], hf_names["up"]))
        raise CapabilityError(
            f"{name} consists of {sorted(hf_names)}, which this engine cannot combine: "
            f"{_USE_SUPPORTED}"
        )

    def join_qkv(self, tensors: Sequence[Tensor]) -> Tensor:
        """Interleave full query, key and value tensors as Megatron does."""
        mapping = _import_param_mapping()
        join = mapping.merge_qkv_weights if tensors[0].ndim > 1 else mapping.merge_qkv_biases
        joined: Tensor = join(self.transformer_config, *tensors)
        return joined

    def split_qkv(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value from a full interleaved tensor; inverse of `join_qkv`."""
        mapping = _import_param_mapping()
        split = mapping.split_qkv_weights if tensor.ndim > 1 else mapping.split_qkv_biases
        return tuple(split(self.transformer_config, tensor))


def _to_causal_lm_config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy for the class with a language-model head, by whose name the bridge looks."""
    causal_lm_config = copy.deepcopy(hf_config)
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    missing = MISSING_COMPONENTS.get(hf_config.model_type)
    if missing is not None:
        raise CapabilityError(
            f"the Megatron engine does not support {class_name}, for which it lacks {missing}: use "
            f"the FSDP engine, or {_USE_SUPPORTED.removeprefix('use ')}"
        )
    if class_name is None or hf_config.model_type not in SUPPORTED_MODEL_TYPES:
        raise CapabilityError(
            f"the Megatron engine does not support {class_name or type(hf_config).__name__} and "
            f"could leave out parts of it without an error: {_USE_SUPPORTED}"
        )
    causal_lm_config.architectures = [class_name]
    rope: Mapping[str, object] = causal_lm_config.to_dict().get("rope_parameters") or {}
    # transformers 5 keeps the base in `rope_parameters`.
    if find_installed_pair().ignores_rope_parameters and "rope_theta" in rope:
        causal_lm_config.rope_theta = rope["rope_theta"]
    return causal_lm_config


def _to_grouped_name(name: str) -> str:
    """Return the name that a parameter has in Megatron's grouped experts.

    Example:
        >>> _to_grouped_name("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
        'decoder.layers.0.mlp.experts.linear_fc1.weight3'
    """
    experts, _, rest = name.partition(".local_experts.")
    number, _, parameter = rest.partition(".")
    return f"{experts}.{parameter}{number}"


def _register_own_bridges() -> None:
    # Importing registers it. Done here, because the module needs Megatron-Bridge.
    import temper_engine_megatron.bridge_compat.mixtral_bridge  # noqa: F401


def _import_model_bridge() -> Any:
    from megatron.bridge.models.conversion import model_bridge

    return model_bridge


def _import_param_mapping() -> Any:
    from megatron.bridge.models.conversion import param_mapping

    return param_mapping
