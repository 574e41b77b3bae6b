"""A bridge for the text models of Qwen3.5, which not all versions of Megatron-Bridge have."""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.qwen.qwen3_next_bridge import Qwen3NextBridge

_MLP, _HF_MLP = "decoder.layers.*.mlp", "model.layers.*.mlp"


class Qwen35TextBridge(Qwen3NextBridge):
    """Qwen3-Next's names and attention, with experts or a dense MLP."""

    PROVIDER_CLASS = GPTModelProvider

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return Megatron's config; the base class translates the fields that all models have."""
        provider = MegatronModelBridge.provider_bridge(self, hf_pretrained)
        config = hf_pretrained.config
        provider.normalization = "RMSNorm"
        provider.layernorm_zero_centered_gamma = True
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.hidden_dropout = 0.0
        provider.qk_layernorm = True
        provider.attention_output_gate = True
        if provider.num_moe_experts:
            provider.moe_shared_expert_intermediate_size = config.shared_expert_intermediate_size
            provider.moe_shared_expert_gate = True
        return provider

    def mapping_registry(self) -> Any:
        """Return the names of the files for Megatron's layers in plain torch."""
        return MegatronMappingRegistry(
            *super().mapping_registry().mappings,
            GatedMLPMapping(
                megatron_param=f"{_MLP}.linear_fc1.weight",
                gate=f"{_HF_MLP}.gate_proj.weight",
                up=f"{_HF_MLP}.up_proj.weight",
            ),
            AutoMapping(
                megatron_param=f"{_MLP}.linear_fc2.weight", hf_param=f"{_HF_MLP}.down_proj.weight"
            ),
        )
