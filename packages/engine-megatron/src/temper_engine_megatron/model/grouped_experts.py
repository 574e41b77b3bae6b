"""Experts whose matrices are multiplied in one grouped product per layer on CUDA.

Megatron's own grouped experts need TransformerEngine or the package grouped_gemm. Here each expert
keeps its own parameters, so names, checkpoints and optimizer are the same as for Megatron's
sequential experts; the weights of a layer are copied to one tensor for the product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import functional as F

from temper_engine_megatron.huggingface.weight_names import ADAPTER_MODULE


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts with grouped products in bf16 on CUDA."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the experts of this rank; same arguments as Megatron's.

        Args:
            permuted_local_hidden_states: [N, H], sorted by expert.
            tokens_per_expert: [E] number of rows per local expert.
            permuted_probs: [N] router weight per row.

        Returns:
            [N, H] and no bias.
        """
        rows = permuted_local_hidden_states
        if not self._can_group(rows):
            output: tuple[Tensor, Tensor | None] = super().forward(
                rows, tokens_per_expert, permuted_probs
            )
            return output
        first, second = (
            [expert.get_submodule(name).weight for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        grouped = compute_grouped_experts(
            rows,
            permuted_probs,
            tokens_per_expert=tokens_per_expert,
            first=first,
            second=second,
            activation=self.config.activation_func,
            is_gated=self.config.gated_linear_unit,
        )
        return grouped, None

    def _can_group(self, rows: Tensor) -> bool:
        config = self.config
        # An adapter adds its update in hooks of the experts' linear layers, which do not run here.
        is_plain = not (
            ADAPTER_MODULE in self._modules
            or config.add_bias_linear
            or config.moe_apply_probs_on_input
        )
        has_own_activation = (
            config.activation_func_clamp_value is not None or config.glu_linear_offset
        )
        # Each operand's rows have to start at multiples of 16 bytes.
        is_aligned = all(
            expert_weight.shape[1] % 8 == 0 for expert_weight in self.local_experts[0].parameters()
        )
        # PyTorch has grouped kernels for bf16; in other dtypes it runs a loop as well.
        has_kernel = rows.is_cuda and rows.dtype is torch.bfloat16
        return bool(has_kernel and is_plain and is_aligned and not has_own_activation)


def compute_grouped_experts(
    rows: Tensor,
    probs: Tensor,
    *,
    tokens_per_expert: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    activation: Callable[[Tensor], Tensor],
    is_gated: bool = True,
) -> Tensor:
    """Compute p W2 (f(g) * u) with [g, u] = W1 x for the rows x of each expert.

    Without gates, compute p W2 f(W1 x).

    Args:
        rows: [N, H], sorted by expert.
        probs: [N] router weight p per row.
        tokens_per_expert: [E] number of rows per expert, on any device.
        first: W1 per expert, [2 F, H] with the gate g before u; [F, H] without gates.
        second: W2 per expert, [H, F].
        activation: f.
        is_gated: Whether experts have gates.

    Returns:
        [N, H] in the dtype of the rows.
    """
    ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    hidden = _multiply_grouped(rows, first, ends)
    if is_gated:
        gate, up = hidden.chunk(2, dim=-1)
        inner = activation(gate) * up
    else:
        inner = activation(hidden)
    # Megatron weights the input of the second product, in the router's float32.
    weighted = (inner * probs[:, None]).to(rows.dtype)
    return _multiply_grouped(weighted, second, ends)


def _multiply_grouped(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return x W^T for the rows x of each expert; `ends` [E] is where its rows end."""
    stacked = torch.stack(list(weights)).transpose(-2, -1)
    product: Any = F.grouped_mm(rows, stacked, offs=ends)
    assert isinstance(product, Tensor)
    return product
