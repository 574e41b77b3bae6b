"""Sequence parallel (Ulysses): the ranks of a group hold consecutive slices of one pack, and in attention some heads of the whole pack.

Source: Jacobs et al. 2023, arXiv:2309.14509. Layers, norms and the head see a rank's own tokens; two exchanges around each attention
turn slices into heads and back. Answers are summed over the group, every rank holding zeros where another one answers, and the backward
pass of that sum hands each rank the gradient of its own answers once.
"""

from collections.abc import Callable
from math import lcm
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from temper_engine_api.errors import CapabilityError, ConfigError


class SequenceGroup:
    """The ranks that share one pack, and this one among them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.size = group.size()
        self.rank = dist.get_rank(group)

    def num_padding(self, num_tokens: int) -> int:
        """Tokens that are missing to equal slices."""
        return -num_tokens % self.size

    def slice_bounds(self, num_tokens: int) -> tuple[int, int]:
        """First token of this rank's slice of a pack, and the first after it."""
        length = (num_tokens + self.num_padding(num_tokens)) // self.size
        return self.rank * length, (self.rank + 1) * length

    def take_slice(self, tokens: Tensor) -> Tensor:
        """[..., T] as this rank's [..., S], zeros after the last token."""
        first, end = self.slice_bounds(tokens.shape[-1])
        return nn.functional.pad(tokens, (0, self.num_padding(tokens.shape[-1])))[..., first:end]

    def sum_outputs(self, column: Tensor) -> Tensor:
        """The sum over ranks, whose gradient stays with each rank as it is."""
        total: Tensor = _SumOutputs.apply(column, self._group)  # type: ignore[no-untyped-call]
        return total

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective, which no kernel takes in
    def to_heads(self, x: Tensor) -> Tensor:
        """[1, H, S, D], all heads of this rank's tokens, as [1, H / size, size x S, D], all tokens of its heads.

        Where there are fewer heads than ranks, or not a multiple, each is sent to several ranks.
        """
        repeats = lcm(x.shape[1], self.size) // x.shape[1]
        heads = x[0].repeat_interleave(repeats, dim=0) if repeats > 1 else x[0]
        exchanged: Tensor = _ToHeads.apply(heads, self)  # type: ignore[no-untyped-call]
        return exchanged[None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a collective, which no kernel takes in
    def to_slices(self, x: Tensor) -> Tensor:
        """[1, size x S, H / size, D] of attention's result as [1, S, H, D]."""
        exchanged: Tensor = _ToSlices.apply(x[0].transpose(0, 1), self)  # type: ignore[no-untyped-call]
        return exchanged.transpose(0, 1)[None]

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, ...]: part i goes to rank i; what comes back is ordered by the rank it came from."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received


def _slices_to_heads(x: Tensor, group: SequenceGroup) -> Tensor:
    """[H, S, D] as [H / size, size x S, D]."""
    received = group.exchange(x.unflatten(0, (group.size, -1)))
    return received.transpose(0, 1).flatten(1, 2)


def _heads_to_slices(x: Tensor, group: SequenceGroup) -> Tensor:
    """[H / size, size x S, D] as [H, S, D]."""
    received = group.exchange(x.unflatten(1, (group.size, -1)).transpose(0, 1))
    return received.flatten(0, 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _slices_to_heads(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _heads_to_slices(grad, ctx.group), None  # type: ignore[attr-defined]


class _ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _heads_to_slices(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _slices_to_heads(grad, ctx.group), None  # type: ignore[attr-defined]


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, column: Tensor, group: ProcessGroup) -> Tensor:
        total = column.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class PackInfo(Protocol):
    """What a kernel is told about a pack."""

    sequence_group: SequenceGroup | None
    num_attention_calls: int
    has_window: bool


def parallelize_attention(
    forward: Callable[..., tuple[Tensor, None]],
) -> Callable[..., tuple[Tensor, None]]:
    """An attention kernel over whole packs, for ranks that hold slices of them; as it is where they do not."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packing: PackInfo | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        if packing is None:
            raise CapabilityError(
                f"{type(module).__name__} does not hand on to its attention what its model is "
                "called with, where the bounds of packed "
                "sequences would travel: choose a model whose layers do."
            )
        if not torch.compiler.is_compiling():  # a count would be compiled in
            packing.num_attention_calls += 1
            packing.has_window |= options.get("sliding_window") is not None
        sequence_group = packing.sequence_group
        if sequence_group is None:
            return forward(module, query, key, value, attention_mask, packing=packing, **options)
        # Rotary embeddings may leave query and key in float32: sent as the kernels take them.
        query, key, value = (
            sequence_group.to_heads(x.to(value.dtype)) for x in (query, key, value)
        )
        attended, _ = forward(module, query, key, value, attention_mask, packing=packing, **options)
        return sequence_group.to_slices(attended), None

    return attend


def check_heads(num_heads: int, *, size: int) -> None:
    """Refuse a size that can't share the heads out.

    Raises:
        ConfigError: it does not divide the query heads.
    """
    if num_heads % size:
        raise ConfigError(
            f"sequence_parallel is {size}, but must divide the model's {num_heads} attention heads."
        )
