"""The two collectives with a gradient that Megatron-Core does not bring: keys gathered along the sequence, and answers that meet."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        parts = [torch.empty_like(local) for _ in range(group.size())]
        # gloo sends a tensor's memory as it lies, whatever its strides say.
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()], None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...] of every rank as [S C, ...], in rank order; gradients of all ranks are summed and each gets back its own rows."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks that then all compute the same loss from it, so that a rank's gradient is the loss's, once."""
    if group.size() == 1:
        return part
    total: Tensor = _SumOfParts.apply(part, group)  # type: ignore[no-untyped-call]
    return total
