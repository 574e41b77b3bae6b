"""Multi-head latent attention, as in DeepSeek-V3, with the positions of packed sequences.

Megatron's own forward pass numbers positions through the pack, and without TransformerEngine its
gradient of the shared rotary key lacks the heads of other tensor-parallel ranks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout


class LatentAttention(MLASelfAttention):
    """Megatron's parameters of latent attention with an own forward pass.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, equations 9 to 19.
    """

    rotary_scale = 1.0
    """Factor of rotated queries and keys, which extensions of the context can have."""
    is_interleaved = True
    """True if neighboring dimensions rotate together, False for the two halves of a head."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the layers of the spec, as Megatron-Core before 0.19.

        Later versions replace the projection of queries that are not compressed by a layer of
        TransformerEngine with a norm, which the model does not have.
        """
        norms = ("q_layernorm", "kv_layernorm")
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", *norms)
        return {name: getattr(submodules, name) for name in names}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackLayout | RowLayout,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention for the hidden states [S, R, H] of this rank.

        Args:
            hidden_states: [S, R, H], or a slice of S under sequence parallelism.
            attention_mask: Unused; Megatron passes None.
            rotary_pos_emb: [S, R, 1, D] angles.
            packed_seq_params: Sequence boundaries.

        Returns:
            The output, and a bias that the layer adds.
        """
        query, key, value = self._project(hidden_states, rotary_pos_emb)
        attend = (
            self._checkpointed_attention_forward
            if self.checkpoint_core_attention and self.training
            else self.core_attention
        )
        mixed = attend(query, key, value, None, packed_seq_params=packed_seq_params)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(mixed)
        return output

    def _project(self, hidden_states: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [S, R, H, D] and value [S, R, H, V] of this rank's heads."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            compressed, _ = self.linear_q_down_proj(hidden_states)
            compressed = self._restore_shard(gather_from_tensor_model_parallel_region(compressed))
            query, _ = self.linear_q_up_proj(self.q_layernorm(compressed))
        compressed, _ = self.linear_kv_down_proj(hidden_states)
        compressed, rotary_key = gather_from_tensor_model_parallel_region(compressed).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(self._restore_shard(compressed)))
        query, key_value = (
            x.unflatten(-1, (self.num_attention_heads_per_partition, -1))
            for x in (query, key_value)
        )
        plain_query, rotary_query = query.split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1
        )
        plain_key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # All heads share one rotary key. Its gradient is summed over the ranks with other heads.
        rotary_key = copy_to_tensor_model_parallel_region(rotary_key)[:, :, None]
        rotary_query, rotary_key = (self._rotate(x, angles) for x in (rotary_query, rotary_key))
        key = torch.cat([plain_key, rotary_key.expand(-1, -1, plain_key.shape[2], -1)], dim=-1)
        return torch.cat([plain_query, rotary_query], dim=-1), key, value

    def _restore_shard(self, compressed: Tensor) -> Tensor:
        """Return this rank's tokens, which the next linear layer gathers again."""
        if not self.config.sequence_parallel:
            return compressed
        shard: Tensor = scatter_to_sequence_parallel_region(compressed)
        return shard

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.is_interleaved:
            # Queries and keys are permuted alike, which leaves their products as they are.
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        cos, sin = (part.to(x.dtype) for part in (angles.cos(), angles.sin()))
        rotated: Tensor = (x * cos + torch.cat([-second, first], dim=-1) * sin) * self.rotary_scale
        return rotated


def set_rotary_scale(layers: Any, *, scale: float, is_interleaved: bool) -> None:
    """Set how the latent attention of these layers rotates."""
    for layer in layers:
        layer.self_attention.rotary_scale = scale
        layer.self_attention.is_interleaved = is_interleaved
