"""Log-probs, entropies and normalizers of a head whose vocabulary is split over ranks.

Logits are never gathered. Positions are processed in chunks; each rank has the logits for its own
shard of the vocabulary V and exchanges three numbers per position. With logits z = h W^T /
temperature and p = softmax(z), the gradients are d logsumexp / dz = p, d log p_y / dz = 1_y - p and
dH / dz = -p (log p + H).
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

from temper_engine_api.determinism import batch_invariant_linear

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Float32 outputs at N positions, the same on every rank."""

    logprob: Tensor
    """[N] log-probability of the label."""
    logsumexp: Tensor
    """[N] log of the normalizer, after temperature."""
    entropy: Tensor
    """[N] entropy; zeros if not requested."""
    extra_logprobs: Tensor
    """[N, K] log-probabilities of further token ids; K is 0 if none are requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's shard of the vocabulary, and how its logits are computed."""

    group: dist.ProcessGroup
    """Ranks with the other shards."""
    first_id: int
    """Token id of this rank's first row."""
    num_tokens: int
    """Rows that are tokens; the rows after them pad the vocabulary to equal shards."""
    chunk_size: int
    """Number of positions whose logits are in memory at once."""
    needs_entropy: bool
    uses_compile: bool = False
    """Compile each pass over logits to one kernel."""
    pads_chunks: bool = False
    """Pad every matmul to `chunk_size` rows.

    A GPU selects its kernel by row count. Otherwise a position's bits would depend on how many
    others are requested."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all shards, in place."""
        if self.group.size() > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def chunks(self, num_positions: int) -> list[slice]:
        """Return slices of at most `chunk_size` positions."""
        return [
            slice(start, min(start + self.chunk_size, num_positions))
            for start in range(0, num_positions, self.chunk_size)
        ]


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor,
    extra_ids: Tensor | None,
    shard: VocabShard,
) -> TokenLogprobs:
    """Compute token log-probs of a bias-free linear head with a sharded vocabulary.

    Collective over the shard's group.

    Args:
        hidden: [N, D] in the compute dtype, the same on every rank.
        weight: [V / ranks, D] rows of this rank.
        labels: [N] int64.
        temperature: [N] float32 divisor of the logits.
        extra_ids: [N, K] int64 ids of other tokens whose log-probs are returned too, or
            None.
        shard: This rank's shard.

    Returns:
        Float32 outputs. Matmuls use the compute dtype, everything after them float32.
    """
    extra = labels.new_empty(labels.shape[0], 0) if extra_ids is None else extra_ids
    all_ids = torch.cat([labels[:, None], extra], dim=1)
    logprobs, logsumexp, entropy = _VocabParallelLogprobs.apply(
        hidden, weight, all_ids, temperature[:, None], shard
    )  # type: ignore[no-untyped-call]
    return TokenLogprobs(
        logprob=logprobs[:, 0], logsumexp=logsumexp, entropy=entropy, extra_logprobs=logprobs[:, 1:]
    )


class _VocabParallelLogprobs(torch.autograd.Function):
    """Recomputes the logits in the backward pass instead of keeping them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        all_ids: Tensor,
        temperature: Tensor,
        shard: VocabShard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_positions, rows = hidden.shape[0], weight[: shard.num_tokens]
        logprobs = temperature.new_zeros(all_ids.shape)
        logsumexp = temperature.new_zeros(num_positions)
        entropy = temperature.new_zeros(num_positions)
        for chunk in shard.chunks(num_positions):
            logits = _compute_logits(hidden[chunk], rows, shard)
            logsumexp[chunk], chunk_entropy = _normalizer_and_entropy(
                logits, temperature[chunk], shard
            )
            logprobs[chunk] = (
                _gather_logits(logits, all_ids[chunk], shard) / temperature[chunk]
                - logsumexp[chunk, None]
            )
            if shard.needs_entropy:
                entropy[chunk] = chunk_entropy
        ctx.save_for_backward(hidden, weight, all_ids, temperature, logsumexp, entropy)
        ctx.shard = shard  # type: ignore[attr-defined]
        # The backward pass then sees that the loss does not differentiate the entropy, as when an
        # objective only reports it.
        ctx.set_materialize_grads(False)
        return logprobs, logsumexp, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx,
        grad_logprobs: Tensor | None,
        grad_logsumexp: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, all_ids, temperature, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        rows = weight[: shard.num_tokens]
        # Sums over chunks are accumulated in float32.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(all_ids, dtype=torch.float32)
        if grad_logsumexp is None:
            grad_logsumexp = torch.zeros_like(logsumexp)
        # The coefficient of p: every log-prob contributes -1, and the logsumexp +1.
        p_coefficient = grad_logsumexp - grad_logprobs.sum(1)
        for chunk in shard.chunks(hidden.shape[0]):
            grad = _compute_logits(hidden[chunk], rows, shard)
            columns = (
                temperature[chunk, 0],
                logsumexp[chunk],
                p_coefficient[chunk],
                all_ids[chunk, 0] - shard.first_id,
                grad_logprobs[chunk, 0],
                entropy[chunk],
            )
            chunk_grad_entropy = None if grad_entropy is None else grad_entropy[chunk]
            _maybe_compile(_logits_to_gradient_, shard)(grad, *columns, chunk_grad_entropy)
            if all_ids.shape[1] > 1:
                local_ids, is_local = _to_local_ids(all_ids[chunk, 1:], shard)
                extra_grad = grad_logprobs[chunk, 1:] * is_local / temperature[chunk]
                grad.scatter_add_(1, local_ids, extra_grad.to(grad.dtype))
            grad_hidden[chunk] = (grad @ rows).float()
            grad_weight[: shard.num_tokens] += (grad.t() @ hidden[chunk]).float()
        return (
            # The gradient of the hidden states is summed over ranks, because each rank has the
            # terms for its part of the vocabulary. The gradient of the weight is not summed,
            # because a rank has all positions for its rows.
            shard.sum(grad_hidden).to(hidden.dtype),
            grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _compute_logits(hidden: Tensor, rows: Tensor, shard: VocabShard) -> Tensor:
    """Compute [C, V / ranks] logits in the compute dtype, before temperature."""
    # A plain matmul would round differently for another number of positions, and a log-prob must
    # not depend on it.
    size = hidden.shape[0]
    if not shard.pads_chunks or size == shard.chunk_size:
        return batch_invariant_linear(hidden, rows)
    return batch_invariant_linear(functional.pad(hidden, (0, 0, 0, shard.chunk_size - size)), rows)[
        :size
    ]


@cache
def _compile(function: Callable[P, T]) -> Callable[P, T]:
    # Compile with dynamic shapes, because micro-batches differ in their number of rows.
    compiled: Callable[P, T] = torch.compile(function, dynamic=True)
    return compiled


def _maybe_compile(function: Callable[P, T], shard: VocabShard) -> Callable[P, T]:
    return _compile(function) if shard.uses_compile else function


def _normalizer_and_entropy(
    logits: Tensor, temperature: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Return the [C] log of the normalizer over all shards and the [C] entropy."""
    local_max, total, weighted = _maybe_compile(_softmax_sums, shard)(logits, temperature)
    largest = local_max
    if shard.group.size() > 1:
        largest = local_max.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
        # Each rank's sums are relative to its own maximum; move them to the global one.
        shift = local_max - largest
        # Stacked, so that both sums take one collective.
        total, weighted = shard.sum(torch.stack([total, weighted + total * shift]) * shift.exp())
    return total.log() + largest, total.log() - weighted / total


def _softmax_sums(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row m = max z, sum exp(z - m) and sum exp(z - m) (z - m)."""
    tempered = logits.float() / temperature
    largest = tempered.amax(1, keepdim=True)
    shifted = tempered - largest
    weights = torch.exp(shifted)
    return largest[:, 0], weights.sum(1), (weights * shifted).sum(1)


def _logits_to_gradient_(
    logits: Tensor,
    temperature: Tensor,
    logsumexp: Tensor,
    p_coefficient: Tensor,
    label: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Replace logits [C, V / ranks] by their gradient; labels of other shards match no column."""
    logs = logits.float() / temperature[:, None] - logsumexp[:, None]
    coefficient = (
        p_coefficient[:, None]
        if grad_entropy is None
        else p_coefficient[:, None] - grad_entropy[:, None] * (logs + entropy[:, None])
    )
    is_label = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
    grad = logs.exp() * coefficient + torch.where(is_label, grad_logprob[:, None], 0.0)
    logits.copy_(grad / temperature[:, None])


def _to_local_ids(ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the columns for token ids on this rank (0 elsewhere) and a mask that marks them."""
    # `gather` and `scatter_add` need a valid column for every id; the mask removes the others.
    column = ids - shard.first_id
    is_local = (column >= 0) & (column < shard.num_tokens)
    return torch.where(is_local, column, 0), is_local


def _gather_logits(logits: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Return [C, K] float32 logits for token ids in any shard."""
    local_ids, is_local = _to_local_ids(ids, shard)
    return shard.sum(torch.where(is_local, logits.gather(1, local_ids).float(), 0.0))
