"""The decoder layer: parallel linear layers with a norm and attention in plain torch.

Megatron's own plain-torch norm refuses sequence parallelism, and its plain-torch attention refuses
packed sequences and context parallelism. The linear layers can be TransformerEngine's; see
docs/decisions/0025-layers-in-plain-torch.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from temper_engine_megatron.bridge_compat import get_mlp_submodules, replace_experts
from temper_engine_megatron.bridge_compat.bridge_translation import find_sparse_layers
from temper_engine_megatron.model.grouped_experts import GroupedExperts
from temper_engine_megatron.model.latent_attention import LatentAttention
from temper_engine_megatron.model.latent_experts import (
    NarrowGroupedExperts,
    NarrowSequentialExperts,
)
from temper_engine_megatron.model.moe_router import (
    MoETransformerLayer,
    SequenceLossRouter,
)
from temper_engine_megatron.model.packed_attention import (
    PackLayout,
    RowLayout,
    Scores,
    compute_attention,
    gather_sequence,
)
from temper_engine_megatron.model.stacked_experts import StackedExperts


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism, and weights around 0 instead of 1.

    Megatron sums the gradients of weights marked `sequence_parallel` over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_zero_centered: bool = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if not self._is_zero_centered:
            normalized: Tensor = super().forward(x)
            return normalized
        # In float32, as in transformers: 1 + w in bf16 would round small weights away.
        weight = 1.0 + self.weight.float()
        return rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class LatentNorm(RMSNorm):
    """Norm of the latents of attention, whose epsilon is the same for all configs of transformers.

    `rms_norm_eps` sets that of the other norms.
    """

    def __init__(self, config: Any, hidden_size: int, **_: object) -> None:
        # Megatron passes the epsilon of the config, too.
        super().__init__(config, hidden_size, eps=1e-6)


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
        # `transformer_settings` has one window per layer; Megatron counts layers from 1.
        self._window: int | None = config.layer_windows[layer_number - 1]
        self._rotary_scale: tuple[int, float] | None = config.rotary_scale
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        if self._rotary_scale is not None:
            query, key = (_scale_rotated(x, *self._rotary_scale) for x in (query, key))
        key, value = (gather_sequence(x, self._group) for x in (key, value))
        scores = Scores(scale=self._scale, window=self._window, sinks=self.softmax_offset)
        return compute_attention(query, key, value, packed_seq_params, scores=scores).flatten(2)


def _scale_rotated(x: Tensor, num_rotated: int, scale: float) -> Tensor:
    """Multiply the rotated dimensions of queries or keys, which are the first."""
    return torch.cat([x[..., :num_rotated] * scale, x[..., num_rotated:]], dim=-1)


class PostNormLayer(TransformerLayer):
    """Decoder layer that also normalizes the outputs of attention and MLP, as in Gemma 3."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for sublayer in ("self_attn", "mlp"):
            norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
            self.add_module(f"post_{sublayer}_layernorm", norm)
            # Megatron calls this function with the output of the sublayer.
            setattr(self, f"{sublayer}_bda", partial(_make_normalized_add, norm))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the angles of its kind; same arguments as Megatron's."""
        kinds: tuple[int, ...] | None = self.config.rotary_kinds
        if kinds is not None:
            kwargs["rotary_pos_emb"] = kwargs["rotary_pos_emb"][kinds[self.layer_number - 1]]
        return super().forward(*args, **kwargs)


def _make_normalized_add(norm: RMSNorm, *_: object) -> Callable[..., Tensor]:
    def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        output, bias = output_with_bias
        normalized: Tensor = norm(output if bias is None else output + bias)
        return residual + normalized

    return add


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerKind:
    has_experts: bool
    has_state: bool
    """True for a layer with a state, such as linear attention."""
    mixes_tokens: bool
    """True for a layer with attention or a state; False if it has only an MLP or experts."""


def build_block_spec(
    transformer_config: Any,
    *,
    layers: Sequence[int],
    groups_experts: bool,
    uses_transformer_engine: bool,
) -> Any:
    """Build Megatron's spec of one chunk of the decoder: its layers and the norm after the last.

    Args:
        transformer_config: Megatron's transformer config.
        layers: Numbers of the chunk's layers, counted from 0.
        groups_experts: Compute the experts of a layer in one grouped product where possible.
        uses_transformer_engine: Use TransformerEngine's linear layers in attention and dense MLPs.
    """
    sparse_layers = find_sparse_layers(transformer_config)
    kinds = [
        _LayerKind(
            has_experts=layer in sparse_layers,
            has_state=layer in transformer_config.linear_layers,
            mixes_tokens=layer not in transformer_config.tokenwise_layers,
        )
        for layer in layers
    ]
    specs = {
        kind: _build_layer_spec(transformer_config, kind=kind, groups_experts=groups_experts)
        for kind in set(kinds)
    }
    if uses_transformer_engine:
        # Imported here, because it needs TransformerEngine.
        from temper_engine_megatron.model.transformer_engine_layers import replace_linear_layers

        # False for Nemotron-H, whose layers have either attention or an MLP.
        has_paired_layers = transformer_config.has_paired_layers
        for kind, spec in specs.items():
            replace_linear_layers(
                spec,
                in_attention=kind.mixes_tokens
                and not (kind.has_state or transformer_config.multi_latent_attention),
                in_mlp=not kind.has_experts and (has_paired_layers or not kind.mixes_tokens),
            )
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in kinds], layer_norm=RMSNorm
    )


def _build_layer_spec(transformer_config: Any, *, kind: _LayerKind, groups_experts: bool) -> Any:
    # Megatron's "local" spec is the one without TransformerEngine.
    layer = get_gpt_layer_local_spec(
        # Megatron's own grouped products need TransformerEngine.
        num_experts=transformer_config.num_moe_experts if kind.has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=transformer_config.qk_layernorm,
        multi_latent_attention=transformer_config.multi_latent_attention,
        normalization=transformer_config.normalization,
    )
    if transformer_config.has_post_norms:
        layer.module = PostNormLayer
    if kind.has_experts:
        layer.module = MoETransformerLayer
        get_mlp_submodules(layer).router = SequenceLossRouter
        experts = _choose_experts(transformer_config, groups_experts=groups_experts)
        if experts is not None:
            replace_experts(layer, experts)
    # Every norm and the attention are replaced; the linear layers remain Megatron's.
    submodules = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    if not transformer_config.has_paired_layers:
        _keep_single_part(submodules, mixes_tokens=kind.mixes_tokens)
    if not kind.mixes_tokens:
        return layer
    if kind.has_state:
        # Imported here, because older versions of transformers do not have it.
        from temper_engine_megatron.model.linear_attention import LinearAttention

        submodules.self_attention = ModuleSpec(module=LinearAttention)
        return layer
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if transformer_config.multi_latent_attention:
        submodules.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif transformer_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _choose_experts(transformer_config: Any, *, groups_experts: bool) -> type | None:
    """Return the class of a layer's experts; None for Megatron's own."""
    if transformer_config.stacks_experts:
        return StackedExperts
    if transformer_config.expert_width is not None:
        return NarrowGroupedExperts if groups_experts else NarrowSequentialExperts
    return GroupedExperts if groups_experts else None


def _keep_single_part(submodules: Any, *, mixes_tokens: bool) -> None:
    """Keep only one part of a layer: its attention or state, or its MLP or experts."""
    if mixes_tokens:
        submodules.pre_mlp_layernorm = submodules.mlp = IdentityOp
        submodules.mlp_bda = IdentityFuncOp
    else:
        submodules.input_layernorm = submodules.self_attention = IdentityOp
        submodules.self_attn_bda = IdentityFuncOp
