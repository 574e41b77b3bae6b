"""A bridge for Nemotron-H, whose decoder is Megatron's GPT model here instead of its Mamba model.

Megatron's Mamba layers need the package mamba-ssm. The engine's are those of transformers.
"""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, QKVMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.activations import squared_relu

_LAYER, _MIXER = "decoder.layers.*", "backbone.layers.*.mixer"
_EXPERT = "mlp.experts.local_experts.*"
_PLAIN = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "backbone.norm_f.weight",
    # A layer has one norm, before its only part.
    f"{_LAYER}.input_layernorm.weight": "backbone.layers.*.norm.weight",
    f"{_LAYER}.pre_mlp_layernorm.weight": "backbone.layers.*.norm.weight",
    f"{_LAYER}.self_attention.linear_proj.weight": f"{_MIXER}.o_proj.weight",
    f"{_LAYER}.mlp.linear_fc1.weight": f"{_MIXER}.up_proj.weight",
    f"{_LAYER}.mlp.linear_fc2.weight": f"{_MIXER}.down_proj.weight",
    f"{_LAYER}.mlp.router.weight": f"{_MIXER}.gate.weight",
    f"{_LAYER}.mlp.router.expert_bias": f"{_MIXER}.gate.e_score_correction_bias",
    f"{_LAYER}.mlp.shared_experts.linear_fc1.weight": f"{_MIXER}.shared_experts.up_proj.weight",
    f"{_LAYER}.mlp.shared_experts.linear_fc2.weight": f"{_MIXER}.shared_experts.down_proj.weight",
    f"{_LAYER}.mlp.fc1_latent_proj.weight": f"{_MIXER}.fc1_latent_proj.weight",
    f"{_LAYER}.mlp.fc2_latent_proj.weight": f"{_MIXER}.fc2_latent_proj.weight",
    f"{_LAYER}.{_EXPERT}.linear_fc1.weight": f"{_MIXER}.experts.*.up_proj.weight",
    f"{_LAYER}.{_EXPERT}.linear_fc2.weight": f"{_MIXER}.experts.*.down_proj.weight",
}


class NemotronHBridge(MegatronModelBridge):
    """Nemotron-H's structure and the names of its files, in the bridge's terms."""

    PROVIDER_CLASS = GPTModelProvider

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return Megatron's config; the base class translates the fields that all models have."""
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config
        provider.normalization = "RMSNorm"
        provider.layernorm_epsilon = config.layer_norm_epsilon
        provider.gated_linear_unit = False
        provider.activation_func = squared_relu
        # The attention of transformers has no biases, whatever its config says.
        provider.add_qkv_bias = False
        provider.moe_layer_freq = [int(kind == "moe") for kind in config.layers_block_type]
        provider.moe_shared_expert_intermediate_size = config.moe_shared_expert_intermediate_size
        provider.moe_router_enable_expert_bias = True
        return provider

    def mapping_registry(self) -> Any:
        """Return the names of the files for Megatron's layers in plain torch."""
        return MegatronMappingRegistry(
            *(AutoMapping(megatron_param=name, hf_param=file) for name, file in _PLAIN.items()),
            QKVMapping(
                megatron_param=f"{_LAYER}.self_attention.linear_qkv.weight",
                q=f"{_MIXER}.q_proj.weight",
                k=f"{_MIXER}.k_proj.weight",
                v=f"{_MIXER}.v_proj.weight",
            ),
        )
