"""A bridge for Mixtral, which Megatron-Bridge does not have."""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    QKVMapping,
)

_LAYER, _HF_LAYER = "decoder.layers.*", "model.layers.*"
_EXPERT = f"{_HF_LAYER}.block_sparse_moe.experts.*"
_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    f"{_LAYER}.input_layernorm.weight": f"{_HF_LAYER}.input_layernorm.weight",
    f"{_LAYER}.pre_mlp_layernorm.weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
    f"{_LAYER}.self_attention.linear_proj.weight": f"{_HF_LAYER}.self_attn.o_proj.weight",
    f"{_LAYER}.mlp.router.weight": f"{_HF_LAYER}.block_sparse_moe.gate.weight",
    f"{_LAYER}.mlp.experts.local_experts.*.linear_fc2.weight": f"{_EXPERT}.w2.weight",
}


class MixtralBridge(MegatronModelBridge):
    """Mixtral's structure and the names of its files, in the bridge's terms."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return Megatron's config; the base class translates the fields that all models have."""
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.hidden_dropout = 0.0
        # The config has one width, that of the experts.
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        return provider

    def mapping_registry(self) -> Any:
        """Return the names of the files for Megatron's layers in plain torch."""
        return MegatronMappingRegistry(
            *(AutoMapping(megatron_param=name, hf_param=file) for name, file in _PLAIN.items()),
            QKVMapping(
                megatron_param=f"{_LAYER}.self_attention.linear_qkv.weight",
                q=f"{_HF_LAYER}.self_attn.q_proj.weight",
                k=f"{_HF_LAYER}.self_attn.k_proj.weight",
                v=f"{_HF_LAYER}.self_attn.v_proj.weight",
            ),
            GatedMLPMapping(
                megatron_param=f"{_LAYER}.mlp.experts.local_experts.*.linear_fc1.weight",
                gate=f"{_EXPERT}.w1.weight",
                up=f"{_EXPERT}.w3.weight",
            ),
        )
