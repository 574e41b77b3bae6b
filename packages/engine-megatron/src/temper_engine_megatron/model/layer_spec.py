"""The decoder layer in plain torch on Megatron-Core's own parallel matrices: a norm and an attention that know packs and all splits.

TransformerEngine's layers are not offered: docs/decisions/0025-layers-in-plain-torch.md.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from temper_engine_megatron.bridge_compat import get_expert_submodules
from temper_engine_megatron.model.collectives import gather_sequence
from temper_engine_megatron.model.moe_router import MoETransformerLayer, WeightedLossRouter
from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout, compute_attention


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's own refuses sequence parallelism; the mark on the weight makes its gradient be summed over tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a pack; under context parallelism keys and values of all ranks are gathered."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._group = groups.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackLayout | RowLayout,
        **_: object,
    ) -> Tensor:
        """Query [S, R, H, D], key and value [S, R, K, D]; returns [S, R, H D]."""
        key, value = (gather_sequence(x, self._group) for x in (key, value))
        return compute_attention(query, key, value, packed_seq_params, scale=self._scale).flatten(2)


def build_block_spec(settings: Any, *, num_layers: int) -> Any:
    """What one chunk of the decoder consists of: so many layers, and the norm that follows the last one."""
    layer = get_gpt_layer_local_spec(
        # Grouped products of experts need TransformerEngine: each expert is one after the other.
        num_experts=settings.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=settings.qk_layernorm,
        normalization=settings.normalization,
    )
    if settings.num_moe_experts:
        layer.module = MoETransformerLayer
        get_expert_submodules(layer).router = WeightedLossRouter
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
