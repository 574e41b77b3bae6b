"""The decoder layer: Megatron's parallel linear layers with a norm and attention in plain torch.

Megatron's own plain-torch norm refuses sequence parallelism, and its plain-torch attention refuses
packed sequences and context parallelism. TransformerEngine's layers are not offered; see
docs/decisions/0025-layers-in-plain-torch.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.autograd.function import FunctionCtx

from temper_engine_megatron.bridge_compat import get_expert_submodules, replace_experts
from temper_engine_megatron.model.grouped_experts import GroupedExperts
from temper_engine_megatron.model.latent_attention import LatentAttention
from temper_engine_megatron.model.moe_router import (
    MoETransformerLayer,
    SequenceLossRouter,
    find_sparse_layers,
)
from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout, compute_attention


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism.

    Megatron sums the gradients of weights marked `sequence_parallel` over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(MegatronModule):
    """Causal attention within each sequence; gathers keys and values across ranks."""

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
        """Compute attention from query [S, R, H, D], key [S, R, K, D] and value [S, R, K, V].

        Returns:
            [S, R, H V].
        """
        key, value = (gather_sequence(x, self._group) for x in (key, value))
        return compute_attention(query, key, value, packed_seq_params, scale=self._scale).flatten(2)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        slices = [torch.empty_like(local) for _ in range(group.size())]
        # gloo sends the memory of a tensor as it is, ignoring strides.
        dist.all_gather(slices, local.contiguous(), group=group)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        total = grad.contiguous().clone()
        # Queries of every rank used these keys and values.
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()], None


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [S, ...] of every rank to [S C, ...] in rank order; gradients are summed."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered


def build_block_spec(
    transformer_config: Any, *, layers: Sequence[int], groups_experts: bool
) -> Any:
    """Build Megatron's spec of one chunk of the decoder: its layers and the norm after the last.

    Args:
        transformer_config: Megatron's transformer config.
        layers: Numbers of the chunk's layers, counted from 0.
        groups_experts: Compute the experts of a layer in one grouped product where possible.
    """
    sparse_layers = find_sparse_layers(transformer_config)
    specs = {
        has_experts: _build_layer_spec(
            transformer_config, has_experts=has_experts, groups_experts=groups_experts
        )
        for has_experts in {layer in sparse_layers for layer in layers}
    }
    return TransformerBlockSubmodules(
        layer_specs=[specs[layer in sparse_layers] for layer in layers], layer_norm=RMSNorm
    )


def _build_layer_spec(transformer_config: Any, *, has_experts: bool, groups_experts: bool) -> Any:
    # Megatron's "local" spec is the one without TransformerEngine.
    layer = get_gpt_layer_local_spec(
        # Megatron's own grouped products need TransformerEngine.
        num_experts=transformer_config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=transformer_config.qk_layernorm,
        multi_latent_attention=transformer_config.multi_latent_attention,
        normalization=transformer_config.normalization,
    )
    if has_experts:
        layer.module = MoETransformerLayer
        get_expert_submodules(layer).router = SequenceLossRouter
        if groups_experts:
            replace_experts(layer, GroupedExperts)
    # Every norm and the attention are replaced; the linear layers remain Megatron's.
    submodules = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if transformer_config.multi_latent_attention:
        submodules.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif transformer_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
