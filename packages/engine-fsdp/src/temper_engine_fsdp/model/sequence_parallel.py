"""Sequence parallelism (Ulysses): ranks hold slices of one pack, and some heads in attention.

Layers, norms and the head process a rank's own tokens. Two all-to-all exchanges around each
attention turn slices into heads and back. Source: Jacobs et al. 2023, arXiv:2309.14509.

Outputs are summed across the group, with zeros for other ranks' tokens. The backward pass of that
sum is the identity, so each output receives its gradient exactly once.
"""

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from temper_engine_api.distributed.process_group import sum_over_ranks
from temper_engine_api.errors import ConfigError


class SequenceGroup:
    """The ranks that share one pack."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.size = group.size()
        self.rank = dist.get_rank(group)

    def num_padding(self, num_tokens: int) -> int:
        """Return the number of tokens to add for equally long slices."""
        return -num_tokens % self.size

    def slice_bounds(self, num_tokens: int) -> tuple[int, int]:
        """Return this rank's half-open token range."""
        length = (num_tokens + self.num_padding(num_tokens)) // self.size
        return self.rank * length, (self.rank + 1) * length

    def take_slice(self, tokens: Tensor) -> Tensor:
        """Return this rank's slice of [..., T], padded with zeros to [..., S]."""
        first, end = self.slice_bounds(tokens.shape[-1])
        return nn.functional.pad(tokens, (0, self.num_padding(tokens.shape[-1])))[..., first:end]

    def sum_outputs(self, column: Tensor) -> Tensor:
        """Sum a column over the group; the gradient passes through unchanged."""
        return sum_over_ranks(column, group=self._group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives cannot be compiled
    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange tokens for heads: [1, H, S, D] to [1, H / size, size * S, D].

        Heads are repeated if their number is not a multiple of the group size.
        """
        # Fewer key-value heads than ranks: each head goes to several ranks, whose gradients add up.
        repeats = lcm(x.shape[1], self.size) // x.shape[1]
        heads = x[0].repeat_interleave(repeats, dim=0) if repeats > 1 else x[0]
        exchanged: Tensor = _ToHeads.apply(heads, self)  # type: ignore[no-untyped-call]
        return exchanged[None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives cannot be compiled
    def to_slices(self, x: Tensor) -> Tensor:
        """Exchange heads for tokens: [1, size * S, H / size, D] to [1, S, H, D]."""
        exchanged: Tensor = _ToSlices.apply(x[0].transpose(0, 1), self)  # type: ignore[no-untyped-call]
        return exchanged.transpose(0, 1)[None]

    def take_heads(self, per_head: Tensor) -> Tensor:
        """Return the entries [H / size] of this rank's heads."""
        return per_head.chunk(self.size)[self.rank]

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [size, ...] to rank i; return the parts in sender order."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received


def _slices_to_heads(x: Tensor, group: SequenceGroup) -> Tensor:
    """Exchange [H, S, D] to [H / size, size * S, D]."""
    received = group.exchange(x.unflatten(0, (group.size, -1)))
    return received.transpose(0, 1).flatten(1, 2)


def _heads_to_slices(x: Tensor, group: SequenceGroup) -> Tensor:
    """Exchange [H / size, size * S, D] to [H, S, D]."""
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


def check_heads(num_heads: int, *, size: int) -> None:
    """Check that the group size divides the number of query heads.

    Raises:
        ConfigError: If it does not.
    """
    if num_heads % size:
        raise ConfigError(
            f"sequence_parallel is {size}, but must divide the model's {num_heads} attention "
            "heads: choose a divisor."
        )
