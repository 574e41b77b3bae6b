"""Translate a Hugging Face architecture to Megatron with Megatron-Bridge."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.vision_language import has_image_encoder
from temper_engine_megatron.bridge_compat.bridge_import import import_bridge
from temper_engine_megatron.bridge_compat.supported_versions import find_installed_pair

TESTED_MODEL_TYPES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "llama",
)
"""Model types whose log-probs and gradients the kit compares with transformers in each release.

The bridge translates more, but with model classes that do what this engine would leave out, such as
Gemma's scaled embedding; see `huggingface.model_comparison`."""
_USE_SUPPORTED = f"use a {', '.join(TESTED_MODEL_TYPES[:-1])} or {TESTED_MODEL_TYPES[-1]} model."

MISSING_COMPONENTS: Mapping[str, str] = {
    "gemma2": "soft-capped attention and logits",
    "cohere": "LayerNorm, attention parallel to the MLP, and a factor of the logits",
}
"""Components that this engine lacks for families that the FSDP engine supports, by model type."""

_STACKED_EXPERTS = re.compile(
    r"decoder\.layers\.(\d+)\.mlp\.experts\.((?:gate_up|down)_proj(?:_bias)?)"
)
"""Megatron names of `StackedExperts`, which are the engine's own."""
_MIXER = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.mixer\.(.+)")
"""Megatron names of `LinearAttention`, which is the engine's own."""
_MIXER_MODULES: Mapping[str, str] = {"nemotron_h": "backbone.layers.{}.mixer"}
_QWEN_MIXER = "model.layers.{}.linear_attn"
"""Names in files of the modules that `LinearAttention` runs, by model type; the default is
Qwen3-Next's."""
_OWN_NAMES: Mapping[str, str] = {
    "post_self_attn_layernorm.": "self_attention.linear_proj.post_layernorm.",
    "post_mlp_layernorm.": "mlp.linear_fc2.post_layernorm.",
}
"""Parts of names of this engine's modules, and those of the bridge, where norms are elsewhere."""

MappingKind = Literal[
    "plain", "qkv", "gated", "stacked_experts", "experts_a", "experts_b", "gated_experts_b"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """Hugging Face weights that one Megatron parameter consists of."""

    kind: MappingKind
    """The way they are combined.

    - plain: a single tensor.
    - qkv: query, key and value, interleaved by group of heads.
    - gated: gate above up.
    - stacked_experts: a tensor with the experts of all ranks in its first dimension.
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
        model_bridge = _make_own_bridge(hf_config.model_type)
        if model_bridge is None:
            class_name = causal_lm_config.architectures[0]
            if class_name not in bridge.AutoBridge.list_supported_models():
                raise CapabilityError(
                    f"the Megatron engine does not support {class_name}, which the installed "
                    f"Megatron-Bridge does not translate: {_USE_SUPPORTED}"
                )
            model_bridge = _import_model_bridge().get_model_bridge(
                getattr(transformers, class_name)
            )
            # Newer bridges read these for their names; without files they have one name per expert.
            model_bridge.hf_config = causal_lm_config
            model_bridge.hf_pretrained = SimpleNamespace(config=causal_lm_config)
            auto_bridge = bridge.AutoBridge.from_hf_config(causal_lm_config)
            provider = auto_bridge.to_megatron_provider(load_weights=False)
        else:
            provider = model_bridge.provider_bridge(SimpleNamespace(config=causal_lm_config))
        _complete_structure(provider, hf_config)
        self.transformer_config: Any = provider
        """Megatron's transformer config; the caller adds the settings of the run."""
        self._mapping_registry = model_bridge.mapping_registry()
        self.model_type: str = hf_config.model_type
        """Model type of the architecture."""

    def find_mapping(self, name: str) -> WeightMapping:
        """Return the mapping of a parameter by Megatron name, with the global layer number.

        Raises:
            CapabilityError: If the bridge does not know the parameter.
        """
        match = _STACKED_EXPERTS.fullmatch(name)
        if match is not None:
            file_name = f"model.layers.{match[1]}.mlp.experts.{match[2]}"
            return WeightMapping(kind="stacked_experts", names=(file_name,))
        match = _MIXER.fullmatch(name)
        if match is not None:
            module = _MIXER_MODULES.get(self.model_type, _QWEN_MIXER).format(match[1])
            file_name = f"{module}.{match[2]}"
            return WeightMapping(kind="plain", names=(file_name,))
        for own_name, bridge_name in _OWN_NAMES.items():
            name = name.replace(own_name, bridge_name)
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


def is_expert_stack(name: str) -> bool:
    """Return True for Megatron names of parameters with one entry per expert, as in the files."""
    return _STACKED_EXPERTS.fullmatch(name) is not None


def has_expert_stacks(hf_config: PretrainedConfig) -> bool:
    """Return True if the engine runs the experts of this model in `StackedExperts`."""
    return bool(hf_config.model_type == "gpt_oss")


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
    if has_image_encoder(hf_config.model_type):
        raise CapabilityError(
            f"the Megatron engine does not support {type(hf_config).__name__}, which has an "
            f"encoder of images: use the FSDP engine, or {_USE_SUPPORTED.removeprefix('use ')}"
        )
    if class_name is None:
        raise CapabilityError(
            f"the Megatron engine does not support {type(hf_config).__name__}, for which "
            f"transformers has no causal language model: {_USE_SUPPORTED}"
        )
    # The bridge reads fields of all architectures, such as routed_scaling_factor.
    for name in hf_config.to_dict().keys() - read_declared_fields(hf_config).keys():
        delattr(causal_lm_config, name)
    causal_lm_config.architectures = [class_name]
    rope: dict[str, object] = causal_lm_config.to_dict().get("rope_parameters") or {}
    if "rope_type" in rope:
        # The engine computes the angles. Bridges read fields of some types that a model may not
        # have, and Mistral's passes yarn's factor to a class that does not take it.
        causal_lm_config.rope_parameters = {**rope, "rope_type": "default"}
    # transformers 5 keeps the base in `rope_parameters`.
    if find_installed_pair().ignores_rope_parameters and "rope_theta" in rope:
        causal_lm_config.rope_theta = rope["rope_theta"]
    # Bridges read these fields of transformers 4; the engine takes the values of 5 itself.
    for name, value in {"full_attention_interval": 1, "partial_rotary_factor": 1.0}.items():
        if not hasattr(causal_lm_config, name):
            setattr(causal_lm_config, name, value)
    return causal_lm_config


def read_declared_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that its model reads.

    transformers keeps any key of a file, but models read the fields that their config class
    declares. Only head_dim is read where it is not declared.
    """
    declared = type(hf_config)().to_dict().keys() | {"head_dim"}
    return {name: value for name, value in hf_config.to_dict().items() if name in declared}


def _complete_structure(provider: Any, hf_config: PretrainedConfig) -> None:
    """Set what the bridge leaves out of Megatron's config, or cannot express."""
    fields = read_declared_fields(hf_config)
    # Nemotron-H has attention, a Mamba layer, an MLP or experts in a layer; others have pairs.
    single_kinds = fields.get("layers_block_type")
    if single_kinds is not None:
        _check_kinds(single_kinds)
    kinds = single_kinds or fields.get("layer_types") or []
    # Megatron's class does not have these attributes; the engine's layers read them.
    provider.linear_layers = _find_layers(kinds, "linear_attention")
    provider.has_paired_layers = single_kinds is None
    provider.tokenwise_layers = _find_layers(kinds, "mlp", "moe")
    # Megatron's own narrow experts need TransformerEngine.
    provider.expert_width, provider.moe_latent_size = fields.get("moe_latent_size"), None
    if hf_config.model_type == "glm4_moe":
        # The bridge gives the shared experts the width of one.
        width = hf_config.n_shared_experts * hf_config.moe_intermediate_size
        provider.moe_shared_expert_intermediate_size = width or None
    if provider.num_moe_experts and not find_sparse_layers(provider):
        # Such configs have fields of experts, too, and Megatron refuses some of them.
        provider.num_moe_experts = provider.moe_ffn_hidden_size = None
        provider.moe_router_num_groups = provider.moe_router_group_topk = None
        provider.moe_shared_expert_intermediate_size = None
        provider.moe_router_enable_expert_bias = provider.moe_permute_fusion = False
    if provider.multi_latent_attention:
        # The bridge keeps Megatron's default where the model has none.
        provider.q_lora_rank = hf_config.q_lora_rank


def _check_kinds(kinds: Sequence[str]) -> None:
    # Older releases of transformers 5 name them otherwise, and such layers would become attention.
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention", "mlp", "moe"})
    if unknown:
        raise ConfigError(
            f"transformers {transformers.__version__} gives the model layers of kinds "
            f"{', '.join(map(repr, unknown))}, which the Megatron engine does not know: install "
            "transformers 5.17 or later, which renames the layers of Nemotron-H."
        )


def _find_layers(kinds: Sequence[str], *chosen: str) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(kinds) if kind in chosen)


def _to_grouped_name(name: str) -> str:
    """Return the name that a parameter has in Megatron's grouped experts.

    Example:
        >>> _to_grouped_name("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
        'decoder.layers.0.mlp.experts.linear_fc1.weight3'
    """
    experts, _, rest = name.partition(".local_experts.")
    number, _, parameter = rest.partition(".")
    return f"{experts}.{parameter}{number}"


def _make_own_bridge(model_type: str) -> Any:
    """Return a bridge of this engine; None where Megatron-Bridge's own is used."""
    # Imported here, because these modules need Megatron-Bridge.
    if model_type == "mixtral":
        from temper_engine_megatron.bridge_compat.mixtral_bridge import MixtralBridge

        return MixtralBridge()
    if model_type == "gemma3_text":
        from temper_engine_megatron.bridge_compat.gemma3_bridge import Gemma3TextBridge

        return Gemma3TextBridge()
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        from temper_engine_megatron.bridge_compat.qwen3_5_bridge import Qwen35TextBridge

        return Qwen35TextBridge()
    if model_type == "nemotron_h":
        from temper_engine_megatron.bridge_compat.nemotron_h_bridge import NemotronHBridge

        return NemotronHBridge()
    return None


def _import_model_bridge() -> Any:
    from megatron.bridge.models.conversion import model_bridge

    return model_bridge


def _import_param_mapping() -> Any:
    from megatron.bridge.models.conversion import param_mapping

    return param_mapping


def find_sparse_layers(transformer_config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers with experts, counted from 0; none in a dense model."""
    layers = range(transformer_config.num_layers)
    if not transformer_config.num_moe_experts:
        return ()
    frequency: int | list[int] = transformer_config.moe_layer_freq
    # Megatron takes the distance of these layers, or a table with 1 for each.
    if isinstance(frequency, int):
        return tuple(layers)[::frequency]
    return tuple(layer for layer in layers if frequency[layer])
