"""Log-probabilities, entropies and normalisers of a projection whose rows are split over ranks, without ever gathering logits.

Chunks of N positions one after the other; each rank has the logits of its own share of the V vocabulary, and three numbers a position
travel. With logits z = h W^T / temperature and p = softmax(z): d logsumexp / dz = p; d log p_y / dz = 1_y - p; dH / dz = -p (log p + H).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from temper_engine_api.projection import project


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadColumns:
    """Float32 answers for N positions, the same on every rank."""

    logprob: Tensor
    """[N] log-probability of the label."""
    logsumexp: Tensor
    """[N] log of the normaliser, after temperature."""
    entropy: Tensor
    """[N] entropy; zeros where it was not asked."""
    logprob_at: Tensor
    """[N, K] log-probabilities of further ids; K is 0 where none were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """This rank's share of the vocabulary."""

    group: dist.ProcessGroup
    """Ranks that have the other shares."""
    first: int
    """Id of this rank's first row."""
    size: int
    """Rows that are words; those behind them pad the vocabulary to equal shares."""
    chunk: int
    """Positions whose logits are held at once."""
    wants_entropy: bool
    """Whether the entropy is computed."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Over all shares, in place."""
        if self.group.size() > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def chunks(self, total: int) -> list[slice]:
        """Slices of at most ``chunk`` positions."""
        return [slice(at, min(at + self.chunk, total)) for at in range(0, total, self.chunk)]


def vocabulary_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: Tensor, ids: Tensor | None, share: HeadShare
) -> HeadColumns:
    """Answers of a linear head without bias. Collective over the share's group.

    Args:
        hidden: [N, D] in the compute dtype, the same on every rank.
        weight: [V / ranks, D] this rank's rows.
        labels: [N] int64.
        temperature: [N] float32 that divides the logits.
        ids: [N, K] int64 further ids.
        share: see HeadShare.

    Returns:
        Float32 columns; matmuls run in the compute dtype, everything after them in float32.
    """
    further = labels.new_empty(labels.shape[0], 0) if ids is None else ids
    chosen = torch.cat([labels[:, None], further], dim=1)
    logprobs, logsumexp, entropy = _Answers.apply(hidden, weight, chosen, temperature[:, None], share)  # type: ignore[no-untyped-call]
    return HeadColumns(logprob=logprobs[:, 0], logsumexp=logsumexp, entropy=entropy, logprob_at=logprobs[:, 1:])


class _Answers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, chosen: Tensor, heat: Tensor, share: HeadShare
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = hidden.shape[0]
        logprobs = heat.new_zeros(chosen.shape)
        logsumexp, entropy = heat.new_zeros(size), heat.new_zeros(size)
        for rows in share.chunks(size):
            logits = _logits(hidden[rows], weight, heat[rows], share)
            normaliser = _normaliser(logits, share)
            logsumexp[rows] = normaliser
            logprobs[rows] = _at(logits, chosen[rows], share) - normaliser[:, None]
            if share.wants_entropy:
                local = logits - normaliser[:, None]
                entropy[rows] = -share.sum(torch.where(local > -torch.inf, local.exp() * local, 0.0).sum(1))
        ctx.save_for_backward(hidden, weight, chosen, heat, logsumexp, entropy)
        ctx.share = share  # type: ignore[attr-defined]
        return logprobs, logsumexp, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_logsumexp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, chosen, heat, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        share: HeadShare = ctx.share  # type: ignore[attr-defined]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        pull = grad_logsumexp - grad_logprobs.sum(1)
        for rows in share.chunks(hidden.shape[0]):
            logs = _logits(hidden[rows], weight, heat[rows], share).sub_(logsumexp[rows, None])
            slope = pull[rows, None].expand_as(logs)
            if share.wants_entropy:
                slope = slope - grad_entropy[rows, None] * torch.where(logs > -torch.inf, logs + entropy[rows, None], 0.0)
            grad = logs.exp().mul_(slope)
            place, is_here = _local_ids(chosen[rows], share)
            grad.scatter_add_(1, place, grad_logprobs[rows] * is_here)
            grad = grad.div_(heat[rows]).to(weight.dtype)
            grad_hidden[rows] = (grad @ weight).float()
            grad_weight += (grad.t() @ hidden[rows]).float()
        return share.sum(grad_hidden).to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, heat: Tensor, share: HeadShare) -> Tensor:
    """[C, V / ranks] float32; rows that only pad the vocabulary have no probability."""
    logits = project(hidden, weight).float() / heat
    logits[:, share.size :] = -torch.inf
    return logits


def _normaliser(logits: Tensor, share: HeadShare) -> Tensor:
    """[C] log of the normaliser over all shares."""
    largest = logits.amax(1)
    if share.group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=share.group)
    return share.sum((logits - largest[:, None]).exp().sum(1)).log() + largest


def _local_ids(ids: Tensor, share: HeadShare) -> tuple[Tensor, Tensor]:
    """Columns of these ids here, 0 where they are elsewhere, and whether they are here."""
    place = ids - share.first
    is_here = (place >= 0) & (place < share.size)
    return torch.where(is_here, place, 0), is_here


def _at(logits: Tensor, ids: Tensor, share: HeadShare) -> Tensor:
    """[C, K] logits of ids from whichever rank has them."""
    place, is_here = _local_ids(ids, share)
    return share.sum(torch.where(is_here, logits.gather(1, place), 0.0))
