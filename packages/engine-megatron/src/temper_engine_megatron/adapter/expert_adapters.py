"""LoRA for experts: y + s B_e A_e x for expert e's tokens x, for both matrices of an expert.

The experts of a rank share two parameters, [E, r, in] and [E, out, r]. PEFT stores A as [r E, in],
expert after expert, and B as [out, r E] with the experts interleaved. Ranks with different experts
split the first dimension. Ranks with shards of an expert's matrices split A or B like its side of
the matrix.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from temper_engine_megatron.adapter.linear_adapters import LayerContext, LoraSettings
from temper_engine_megatron.bridge_compat import MappingKind
from temper_engine_megatron.huggingface.weight_names import ADAPTER_MODULE, EXPERT_LINEARS

Output = tuple[Tensor, Tensor | None]
"""Output of a Megatron linear layer, with a bias or None."""


class ExpertLoraPairs(nn.Module):
    """A and B for one matrix in all local experts."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        *,
        splits_input: bool,
        settings: LoraSettings,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        first, num_experts = weights[0], len(weights)
        self.lora_A = nn.Parameter(first.new_empty(num_experts, settings.rank, first.shape[1]))
        self.lora_B = nn.Parameter(first.new_empty(num_experts, first.shape[0], settings.rank))
        self._group = group
        split, replicated = (
            (self.lora_A, self.lora_B) if splits_input else (self.lora_B, self.lora_A)
        )
        set_tensor_model_parallel_attributes(split, True, 2 if splits_input else 1, 1)
        # The gradient norm counts parameters with this mark on every rank, others on the first
        # tensor-parallel rank only. Megatron sets it for experts that no other rank has.
        set_tensor_model_parallel_attributes(replicated, group.size() == 1, -1, 1)
        self._replicated = replicated
        for parameter in (self.lora_A, self.lora_B):
            # Megatron reads this attribute: True reduces the gradient over all data-parallel ranks,
            # False over the ranks with the same experts.
            parameter.allreduce = vars(first).get("allreduce", True)  # type: ignore[attr-defined]

    def unbind_experts(self) -> list[tuple[Tensor, Tensor]]:
        """Return (A, B) per expert for one pass.

        Ranks with shards of the same matrices process the same tokens, and each has one term of the
        replicated parameter's gradient; the backward pass sums them.
        """
        a, b = (self._sum_gradient(parameter).unbind() for parameter in (self.lora_A, self.lora_B))
        return list(zip(a, b, strict=True))

    def _sum_gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter is not self._replicated or self._group.size() == 1:
            return parameter
        copied: Tensor = copy_to_tensor_model_parallel_region(parameter, group=self._group)
        return copied


class ExpertsAdapter(nn.Module):
    """Adds the low-rank updates to one layer's experts, as hooks on their linear layers."""

    def __init__(self, *, settings: LoraSettings, context: LayerContext) -> None:
        super().__init__()
        self._scale, self._context = settings.scale, context
        self._pairs_in_pass: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def on_forward_start(self, *_: object) -> None:
        """Prepare the pairs of all experts, with a single node in the graph for each parameter."""
        if not self._context.switch.is_off:
            self._pairs_in_pass = {
                name: pairs.unbind_experts()
                for name, pairs in self.named_children()
                if isinstance(pairs, ExpertLoraPairs)
            }

    def on_forward_end(self, *_: object) -> None:
        """Drop the references; the graph keeps what the backward pass needs."""
        self._pairs_in_pass = {}

    def make_hook(
        self, name: str, expert: int
    ) -> Callable[[nn.Module, tuple[Tensor, ...], Output], Output]:
        """Return the hook for one matrix of a local expert."""

        def add_update(_: nn.Module, inputs: tuple[Tensor, ...], output: Output) -> Output:
            if self._context.switch.is_off:
                return output
            y, bias = output
            a, b = self._pairs_in_pass[name][expert]
            low_rank = nn.functional.linear(inputs[0], a)
            return y + nn.functional.linear(low_rank, b) * self._scale, bias

        return add_update


def attach_to_experts(
    experts: nn.Module, *, targets: Sequence[str], settings: LoraSettings, context: LayerContext
) -> None:
    """Attach an adapter to a layer's experts; its parameters become part of their module.

    Args:
        experts: Megatron's module that runs one expert after another.
        targets: Last parts of the joined expert tensors to adapt.
        settings: Settings of the adapter.
        context: This rank's process groups.
    """
    local_experts = list(experts.get_submodule("local_experts").children())
    adapter = ExpertsAdapter(settings=settings, context=context)
    for name in targets:
        layers = [expert.get_submodule(EXPERT_LINEARS[name]) for expert in local_experts]
        weights = [layer.get_parameter("weight") for layer in layers]
        splits_input = EXPERT_LINEARS[name] == "linear_fc2"
        adapter.add_module(
            name,
            ExpertLoraPairs(
                weights, splits_input=splits_input, settings=settings, group=context.expert_tp
            ),
        )
        for number, layer in enumerate(layers):
            layer.register_forward_hook(adapter.make_hook(name, number))
    experts.add_module(ADAPTER_MODULE, adapter)
    experts.register_forward_pre_hook(adapter.on_forward_start)
    experts.register_forward_hook(adapter.on_forward_end)


def join_expert_shards(shards: Sequence[Tensor], *, kind: MappingKind) -> Tensor:
    """Join the shards of tensor-parallel ranks to PEFT's tensor.

    Args:
        shards: [E, r, in] or [E, out, r] of each rank, with all experts; or a full stack.
        kind: Kind of the weight mapping.
    """
    if kind == "stacked_experts":
        (stacked,) = shards
        return stacked
    if kind == "experts_a":
        return torch.cat([*shards], dim=2).flatten(0, 1)
    if kind == "gated_experts_b":
        # Each shard has gate rows above up-projection rows.
        shards = [
            half
            for halves in zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
            for half in halves
        ]
    return torch.cat([*shards], dim=1).permute(1, 2, 0).flatten(1)


def take_expert_shard(
    tensor: Tensor, *, kind: MappingKind, num_experts: int, rank: int, num_ranks: int
) -> Tensor:
    """Return the shard of one tensor-parallel rank, for all experts.

    Inverse of `join_expert_shards`.
    """
    if kind == "stacked_experts":
        return tensor
    if kind == "experts_a":
        by_expert: Tensor = tensor.unflatten(0, (num_experts, -1))
        return by_expert.chunk(num_ranks, dim=2)[rank]
    by_row: Tensor = tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    if kind == "gated_experts_b":
        return torch.cat(
            [half.chunk(num_ranks, dim=1)[rank] for half in by_row.chunk(2, dim=1)], dim=1
        )
    return by_row.chunk(num_ranks, dim=1)[rank]
