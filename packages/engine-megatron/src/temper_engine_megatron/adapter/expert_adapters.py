"""Low-rank updates of experts: with x the tokens of expert e, y + s B_e A_e x, for each of the two matrices of an expert.

Those of one rank's experts lie in two parameters, [E, r, in] and [E, out, r]; PEFT has them as [r E, in], expert after expert, and
[out, r E], in which the experts are next to each other. Over ranks with other experts the first dimension is split, over ranks that hold
parts of an expert's matrices the other one of A or B, as its side of the matrix is.
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
"""Of one of Megatron's linear layers, with a bias or None."""


class ExpertLoraPairs(nn.Module):
    """A and B of one matrix of every expert of this rank."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        *,
        splits_input: bool,
        settings: LoraSettings,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        like, count = weights[0], len(weights)
        self.lora_A = nn.Parameter(like.new_empty(count, settings.rank, like.shape[1]))
        self.lora_B = nn.Parameter(like.new_empty(count, like.shape[0], settings.rank))
        self._group = group
        split, whole = (self.lora_A, self.lora_B) if splits_input else (self.lora_B, self.lora_A)
        set_tensor_model_parallel_attributes(split, True, 2 if splits_input else 1, 1)
        # A mark of what no other rank has, by which the gradient norm counts it; Megatron marks experts' matrices so.
        set_tensor_model_parallel_attributes(whole, group.size() == 1, -1, 1)
        self._whole = whole
        for parameter in (self.lora_A, self.lora_B):
            # Whether all data-parallel ranks have it, or only those with the same experts.
            parameter.allreduce = vars(like).get("allreduce", True)  # type: ignore[attr-defined]

    def of_experts(self) -> list[tuple[Tensor, Tensor]]:
        """(A, B) of each expert, for one pass.

        Ranks that hold parts of the same matrices see the same tokens, and each has a part of the gradient of what is whole on all of
        them; the backward pass sums these.
        """
        first, second = (
            self._summed(parameter).unbind() for parameter in (self.lora_A, self.lora_B)
        )
        return list(zip(first, second, strict=True))

    def _summed(self, parameter: nn.Parameter) -> Tensor:
        if parameter is not self._whole or self._group.size() == 1:
            return parameter
        summed: Tensor = copy_to_tensor_model_parallel_region(parameter, group=self._group)
        return summed


class ExpertsAdapter(nn.Module):
    """What an adapter adds inside the experts of one layer: hooks of their linear layers."""

    def __init__(self, *, settings: LoraSettings, around: LayerContext) -> None:
        super().__init__()
        self._scale, self._around = settings.scale, around
        self._passing: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def begin(self, *_: object) -> None:
        """Before the experts of a layer see their tokens: one node of the graph for all of them."""
        if not self._around.switch.is_off:
            self._passing = {
                name: pairs.of_experts()
                for name, pairs in self.named_children()
                if isinstance(pairs, ExpertLoraPairs)
            }

    def end(self, *_: object) -> None:
        """After it; the graph keeps what it needs."""
        self._passing = {}

    def hook(
        self, name: str, number: int
    ) -> Callable[[nn.Module, tuple[Tensor, ...], Output], Output]:
        """Of one matrix of one expert of this rank."""

        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Output) -> Output:
            if self._around.switch.is_off:
                return output
            y, bias = output
            down, up = self._passing[name][number]
            low = nn.functional.linear(inputs[0], down)
            return y + nn.functional.linear(low, up) * self._scale, bias

        return add


def attach_to_experts(
    experts: nn.Module, *, targets: Sequence[str], settings: LoraSettings, around: LayerContext
) -> None:
    """Put an adapter into the experts of a layer; its parameters are part of that module from now on.

    Args:
        experts: Megatron's module, which runs one expert after the other.
        targets: which of the tensors in which transformers joins their matrices.
        settings: of the adapter.
        around: where they compute.
    """
    local = list(experts.get_submodule("local_experts").children())
    beside = ExpertsAdapter(settings=settings, around=around)
    for name in targets:
        layers = [expert.get_submodule(EXPERT_LINEARS[name]) for expert in local]
        weights = [layer.get_parameter("weight") for layer in layers]
        splits_input = EXPERT_LINEARS[name] == "linear_fc2"
        beside.add_module(
            name,
            ExpertLoraPairs(
                weights, splits_input=splits_input, settings=settings, group=around.expert_tp
            ),
        )
        for number, layer in enumerate(layers):
            layer.register_forward_hook(beside.hook(name, number))
    experts.add_module(ADAPTER_MODULE, beside)
    experts.register_forward_pre_hook(beside.begin)
    experts.register_forward_hook(beside.end)


def joined(parts: Sequence[Tensor], *, kind: MappingKind) -> Tensor:
    """PEFT's tensor out of the parts of the ranks that split an expert's matrices; each has all experts, [E, r, in] or [E, out, r]."""
    if kind == "experts_a":
        return torch.cat([*parts], dim=2).flatten(0, 1)
    if kind == "gated_experts_b":
        # Each part is rows of the gate above rows of the up-projection.
        parts = [
            half
            for halves in zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            for half in halves
        ]
    return torch.cat([*parts], dim=1).permute(1, 2, 0).flatten(1)


def part_of(tensor: Tensor, *, kind: MappingKind, num_experts: int, rank: int, size: int) -> Tensor:
    """The reverse: all experts' part of one of so many ranks."""
    if kind == "experts_a":
        pairs: Tensor = tensor.unflatten(0, (num_experts, -1))
        return pairs.chunk(size, dim=2)[rank]
    stacked: Tensor = tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    if kind == "gated_experts_b":
        return torch.cat([half.chunk(size, dim=1)[rank] for half in stacked.chunk(2, dim=1)], dim=1)
    return stacked.chunk(size, dim=1)[rank]
