"""Log-probabilities, entropies and normalisers of a projection whose rows are split over ranks, without ever gathering logits.

ModelChunks of N positions one after the other; each rank has the logits of its own share of the V vocabulary, and three numbers a position
travel. With logits z = h W^T / temperature and p = softmax(z): d logsumexp / dz = p; d log p_y / dz = 1_y - p; dH / dz = -p (log p + H).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import FunctionCtx

from temper_engine_api.batch_invariant import batch_invariant_linear

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
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
class VocabShard:
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
    is_compiled: bool = False
    """Whether each pass over logits is one compiled kernel."""
    fills_chunks: bool = False
    """Whether every product has a whole chunk of rows, so that a position has the same bits however many others are asked; a GPU chooses
    its kernel by the number of rows."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Over all shares, in place."""
        if self.group.size() > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def chunks(self, total: int) -> list[slice]:
        """Slices of at most ``chunk`` positions."""
        return [slice(at, min(at + self.chunk, total)) for at in range(0, total, self.chunk)]


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor,
    ids: Tensor | None,
    share: VocabShard,
) -> TokenLogprobs:
    """Answers of a linear head without bias. Collective over the share's group.

    Args:
        hidden: [N, D] in the compute dtype, the same on every rank.
        weight: [V / ranks, D] this rank's rows.
        labels: [N] int64.
        temperature: [N] float32 that divides the logits.
        ids: [N, K] int64 further ids.
        share: see VocabShard.

    Returns:
        Float32 columns; matmuls run in the compute dtype, everything after them in float32.
    """
    further = labels.new_empty(labels.shape[0], 0) if ids is None else ids
    chosen = torch.cat([labels[:, None], further], dim=1)
    logprobs, logsumexp, entropy = _Answers.apply(
        hidden, weight, chosen, temperature[:, None], share
    )  # type: ignore[no-untyped-call]
    return TokenLogprobs(
        logprob=logprobs[:, 0], logsumexp=logsumexp, entropy=entropy, logprob_at=logprobs[:, 1:]
    )


class _Answers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        chosen: Tensor,
        heat: Tensor,
        share: VocabShard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size, words = hidden.shape[0], weight[: share.size]
        logprobs = heat.new_zeros(chosen.shape)
        logsumexp, entropy = heat.new_zeros(size), heat.new_zeros(size)
        for rows in share.chunks(size):
            logits = _logits(hidden[rows], words, share)
            logsumexp[rows], found = _normaliser_and_entropy(logits, heat[rows], share)
            logprobs[rows] = _at(logits, chosen[rows], share) / heat[rows] - logsumexp[rows, None]
            if share.wants_entropy:
                entropy[rows] = found
        ctx.save_for_backward(hidden, weight, chosen, heat, logsumexp, entropy)
        ctx.share = share  # type: ignore[attr-defined]
        return logprobs, logsumexp, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_logsumexp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, chosen, heat, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        share: VocabShard = ctx.share  # type: ignore[attr-defined]
        words = weight[: share.size]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        # Every log-prob pushes all of p down, the normaliser pulls it up.
        pull = grad_logsumexp - grad_logprobs.sum(1)
        for rows in share.chunks(hidden.shape[0]):
            grad = _logits(hidden[rows], words, share)
            columns = (
                heat[rows, 0],
                logsumexp[rows],
                pull[rows],
                chosen[rows, 0] - share.first,
                grad_logprobs[rows, 0],
                entropy[rows],
            )
            slope = grad_entropy[rows] if share.wants_entropy else None
            _kernel(_into_gradient, share)(grad, *columns, slope)
            if chosen.shape[1] > 1:
                place, is_here = _local_ids(chosen[rows, 1:], share)
                grad.scatter_add_(
                    1, place, (grad_logprobs[rows, 1:] * is_here / heat[rows]).to(grad.dtype)
                )
            grad_hidden[rows] = (grad @ words).float()
            grad_weight[: share.size] += (grad.t() @ hidden[rows]).float()
        return (
            share.sum(grad_hidden).to(hidden.dtype),
            grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, words: Tensor, share: VocabShard) -> Tensor:
    """[C, V / ranks] in the compute dtype, without temperature."""
    size = hidden.shape[0]
    if not share.fills_chunks or size == share.chunk:
        return batch_invariant_linear(hidden, words)
    return batch_invariant_linear(functional.pad(hidden, (0, 0, 0, share.chunk - size)), words)[
        :size
    ]


@cache
def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    # Any number of rows: micro-batches differ in it.
    made: Callable[P, T] = torch.compile(function, dynamic=True)
    return made


def _kernel(function: Callable[P, T], share: VocabShard) -> Callable[P, T]:
    return _compiled(function) if share.is_compiled else function


def _normaliser_and_entropy(
    logits: Tensor, heat: Tensor, share: VocabShard
) -> tuple[Tensor, Tensor]:
    """[C] log of the normaliser over all shares, and [C] entropy, from each share's sums about its own largest logit."""
    own, total, weighted = _kernel(_sums, share)(logits, heat)
    largest = own
    if share.group.size() > 1:
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=share.group)
        drop = own - largest
        total, weighted = share.sum(torch.stack([total, weighted + total * drop]) * drop.exp())
    return total.log() + largest, total.log() - weighted / total


def _sums(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the largest tempered logit m, and the sums of exp(z - m) and of exp(z - m) (z - m)."""
    tempered = logits.float() / heat
    largest = tempered.amax(1, keepdim=True)
    shifted = tempered - largest
    weights = torch.exp(shifted)
    return largest[:, 0], weights.sum(1), (weights * shifted).sum(1)


def _into_gradient(
    logits: Tensor,
    heat: Tensor,
    logsumexp: Tensor,
    pull: Tensor,
    label: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Replace logits [C, V / ranks] by their gradient; labels that are elsewhere match no column."""
    logs = logits.float() / heat[:, None] - logsumexp[:, None]
    slope = (
        pull[:, None]
        if grad_entropy is None
        else pull[:, None] - grad_entropy[:, None] * (logs + entropy[:, None])
    )
    is_label = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
    grad = logs.exp() * slope + torch.where(is_label, grad_logprob[:, None], 0.0)
    logits.copy_(grad / heat[:, None])


def _local_ids(ids: Tensor, share: VocabShard) -> tuple[Tensor, Tensor]:
    """Columns of these ids here, 0 where they are elsewhere, and whether they are here."""
    place = ids - share.first
    is_here = (place >= 0) & (place < share.size)
    return torch.where(is_here, place, 0), is_here


def _at(logits: Tensor, ids: Tensor, share: VocabShard) -> Tensor:
    """[C, K] float32 logits of ids from whichever rank has them."""
    place, is_here = _local_ids(ids, share)
    return share.sum(torch.where(is_here, logits.gather(1, place).float(), 0.0))
