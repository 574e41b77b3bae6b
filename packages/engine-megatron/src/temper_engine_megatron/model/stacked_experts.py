"""Experts whose matrices are stacked as in the files, with biases and a clamped gate: gpt-oss."""

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

_SLOPE = 1.702
"""Factor in the gate of gpt-oss. Not `config.activation_func`, which Megatron compiles."""


class StackedExperts(MegatronModule):
    """The experts of this rank, with the names and shapes of transformers.

    Megatron has one module per expert, and the files have one tensor for all experts of a layer.
    """

    def __init__(
        self, num_local_experts: int, config: Any, *, pg_collection: Any, **_: object
    ) -> None:
        super().__init__(config=config)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        shapes = {
            "gate_up_proj": (hidden, 2 * width),
            "gate_up_proj_bias": (2 * width,),
            "down_proj": (width, hidden),
            "down_proj_bias": (hidden,),
        }
        for name, shape in shapes.items():
            weight = torch.empty(num_local_experts, *shape, dtype=config.params_dtype)
            self.register_parameter(name, nn.Parameter(weight))
        for parameter in self.parameters():
            # The gradient norm counts parameters with this mark on every rank. Ranks that have the
            # same experts are data-parallel ranks for them.
            set_tensor_model_parallel_attributes(parameter, True, -1, 1)
            # Megatron reduces the gradient over the ranks with the same experts only.
            parameter.allreduce = pg_collection.ep.size() == 1

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run the experts of this rank; same arguments as Megatron's.

        Args:
            permuted_local_hidden_states: [N, H], sorted by expert.
            tokens_per_expert: [E] number of rows per local expert.
            permuted_probs: [N] router weight per row.

        Returns:
            [N, H] and no bias.
        """
        rows, counts = permuted_local_hidden_states, tokens_per_expert.to(torch.int64)
        first_bias, second_bias = (
            bias.repeat_interleave(counts.to(bias.device), dim=0, output_size=len(rows))
            for bias in (self.gate_up_proj_bias, self.down_proj_bias)
        )
        hidden = self._apply_gate(_multiply(rows, self.gate_up_proj, counts) + first_bias)
        output = _multiply(hidden, self.down_proj, counts) + second_bias
        return (output * permuted_probs[:, None]).to(rows.dtype), None

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        """Return g sigmoid(1.702 g) (u + 1) for [g, u] side by side in pairs, both clamped."""
        config = self.config
        gate, up = hidden[..., ::2], hidden[..., 1::2]
        limit = config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        gated: Tensor = gate * torch.sigmoid(_SLOPE * gate) * (up + config.glu_linear_offset)
        return gated


def _multiply(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return x W for the rows x of each expert; weights are [E, in, out]."""
    # Rows of each operand have to start at multiples of 16 bytes.
    is_aligned = weights.shape[1] % 8 == 0 and weights.shape[2] % 8 == 0
    if rows.is_cuda and rows.dtype is torch.bfloat16 and is_aligned:
        ends = counts.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        product: Any = F.grouped_mm(rows, weights, offs=ends)
        assert isinstance(product, Tensor)
        return product
    return torch.cat(
        [part @ weight for part, weight in zip(rows.split(counts.tolist()), weights, strict=True)]
    )
