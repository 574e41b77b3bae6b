"""Log-probabilities, entropies and normalisers from hidden states, without ever holding all logits.

Chunks of positions go through the linear head one after the other. Only the log of each normaliser (and the entropy, where it has a
gradient) is kept for the backward pass, which computes a chunk's logits again and turns them into their gradient in place.

With logits z = h W^T / temperature and p = softmax(z): d logsumexp / dz = p; d log p_y / dz = 1_y - p; dH / dz = -p (log p + H).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from temper_engine_api.projection import LEAST_ROWS, project

CPU_CHUNK_BYTES = 128 << 20
CUDA_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadColumns:
    """Float32 answers for N positions."""

    logprob: Tensor
    """[N] log-probability of the label."""
    logsumexp: Tensor
    """[N] log of the normaliser, after temperature."""
    entropy: Tensor
    """[N] entropy; zeros where it was not asked."""
    logprob_at: Tensor
    """[N, K] log-probabilities of further ids; K is 0 where none were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one call computes."""

    chunk: int
    wants_entropy: bool
    entropy_has_gradient: bool


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | None = None,
    ids: Tensor | None = None,
    wants_entropy: bool = False,
    entropy_has_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> HeadColumns:
    """Answers of a linear head without bias.

    Args:
        hidden: [N, D] in the compute dtype.
        weight: [V, D] in the compute dtype.
        labels: [N] int64 below V.
        temperature: [N] float32 that divides the logits; None is 1 everywhere.
        ids: [N, K] int64 below V.
        wants_entropy: compute the entropy.
        entropy_has_gradient: the entropy is part of a loss; without it the backward pass is cheaper.
        chunk_tokens: positions per chunk; None chooses by memory.

    Returns:
        Float32 columns; matmuls run in the compute dtype, everything after them in float32.
    """
    plan = _Plan(
        chunk=chunk_tokens or _default_chunk(weight),
        wants_entropy=wants_entropy,
        entropy_has_gradient=entropy_has_gradient,
    )
    further = labels.new_empty(labels.shape[0], 0) if ids is None else ids
    # An empty tensor divides nothing.
    heat = hidden.new_empty(0, 1, dtype=torch.float32) if temperature is None else temperature[:, None]
    logprob, logsumexp, entropy, logprob_at = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, heat, further, plan
    )
    return HeadColumns(logprob=logprob, logsumexp=logsumexp, entropy=entropy, logprob_at=logprob_at)


def _default_chunk(weight: Tensor) -> int:
    budget = CUDA_CHUNK_BYTES if weight.device.type == "cuda" else CPU_CHUNK_BYTES
    return max(16, budget // (4 * weight.shape[0]))


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        heat: Tensor,
        ids: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = hidden.shape[0]
        logprob, logsumexp, entropy = (hidden.new_zeros(size, dtype=torch.float32) for _ in range(3))
        logprob_at = hidden.new_zeros(ids.shape, dtype=torch.float32)
        logits_buffer = _buffer(size, plan=plan, weight=weight)
        weights_buffer = torch.empty_like(logits_buffer) if plan.wants_entropy else logits_buffer
        for rows in _chunks(size, plan.chunk):
            logits = _logits(hidden[rows], weight, heat=heat[rows], out=logits_buffer)
            chosen = logits.gather(1, torch.cat([labels[rows, None], ids[rows]], dim=1))
            if plan.wants_entropy:
                normaliser = _normalise_with_entropy(logits, scratch=weights_buffer, entropy=entropy[rows])
            else:
                normaliser = _normalise(logits)
            logsumexp[rows] = normaliser
            logprob[rows] = chosen[:, 0] - normaliser
            logprob_at[rows] = chosen[:, 1:] - normaliser[:, None]
        ctx.save_for_backward(hidden, weight, labels, heat, ids, logsumexp, entropy)
        ctx.plan = plan  # type: ignore[attr-defined]
        if not plan.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, logsumexp, entropy, logprob_at

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_logprob: Tensor,
        grad_logsumexp: Tensor,
        grad_entropy: Tensor,
        grad_at: Tensor,
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, labels, heat, ids, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        plan: _Plan = ctx.plan  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        # Coefficient of p in the gradient of the logits: every log-prob pushes all of p down, the normaliser pulls it up.
        pull = grad_logsumexp - grad_logprob - grad_at.sum(1)
        buffer = _buffer(hidden.shape[0], plan=plan, weight=weight)
        for rows in _chunks(hidden.shape[0], plan.chunk):
            logits = _logits(hidden[rows], weight, heat=heat[rows], out=buffer)
            logits.sub_(logsumexp[rows, None])
            if plan.entropy_has_gradient:
                slope = _entropy_slope(logits, grad=grad_entropy[rows], entropy=entropy[rows])
                grad = logits.exp_().mul_(slope.add_(pull[rows, None]))
            else:
                grad = logits.exp_().mul_(pull[rows, None])
            grad.scatter_add_(1, labels[rows, None], grad_logprob[rows, None])
            grad.scatter_add_(1, ids[rows], grad_at[rows])
            if heat.numel() > 0:
                grad.div_(heat[rows])
            _accumulate(grad.to(weight.dtype), hidden[rows], weight, grad_hidden=grad_hidden[rows], grad_weight=grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, size)) for first in range(0, size, chunk)]


def _buffer(size: int, *, plan: _Plan, weight: Tensor) -> Tensor:
    """Room for the logits of one chunk, used again for every chunk: on a CPU fresh memory costs more than what is computed in it."""
    return torch.empty(min(size, plan.chunk), weight.shape[0], dtype=torch.float32, device=weight.device)


def _logits(hidden: Tensor, weight: Tensor, *, heat: Tensor, out: Tensor) -> Tensor:
    """[C, V] float32 logits, in the first rows of the buffer."""
    logits = out[: hidden.shape[0]]
    if weight.dtype == torch.float32 and hidden.shape[0] >= LEAST_ROWS:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(project(hidden, weight))
    return logits.div_(heat) if heat.numel() > 0 else logits


def _normalise(logits: Tensor) -> Tensor:
    """[C] log of the normaliser. Destroys the logits."""
    largest = logits.amax(1, keepdim=True)
    return logits.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0])


def _normalise_with_entropy(logits: Tensor, *, scratch: Tensor, entropy: Tensor) -> Tensor:
    """[C] log of the normaliser; fills entropy [C]. Destroys the logits."""
    largest = logits.amax(1, keepdim=True)
    logits.sub_(largest)
    weights = torch.exp(logits, out=scratch[: logits.shape[0]])
    total = weights.sum(1)
    log_total = total.log()
    entropy.copy_(log_total - weights.mul_(logits).sum(1) / total)
    return log_total.add_(largest[:, 0])


def _entropy_slope(logprobs: Tensor, *, grad: Tensor, entropy: Tensor) -> Tensor:
    """[C, V] what the entropy's gradient multiplies p by: -(log p + H) times its upstream gradient."""
    return logprobs.add(entropy[:, None]).mul_(-grad[:, None])


def _accumulate(grad: Tensor, hidden: Tensor, weight: Tensor, *, grad_hidden: Tensor, grad_weight: Tensor) -> None:
    torch.mm(grad, weight, out=grad_hidden)
    if weight.dtype == torch.float32:
        grad_weight.addmm_(grad.t(), hidden)
    else:
        grad_weight.add_(grad.t() @ hidden)


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FullPlan:
    """What one call computes."""

    wants_entropy: bool
    entropy_has_gradient: bool
    is_compiled: bool


def whole_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | None = None,
    ids: Tensor | None = None,
    wants_entropy: bool = False,
    entropy_has_gradient: bool = False,
    is_compiled: bool = False,
) -> HeadColumns:
    """As ``fused_head.linear_logprob``; ``is_compiled`` makes one kernel of each elementwise pass. Differentiable once."""
    plan = _FullPlan(wants_entropy=wants_entropy, entropy_has_gradient=entropy_has_gradient, is_compiled=is_compiled)
    further = labels.new_empty(labels.shape[0], 0) if ids is None else ids
    heat = hidden.new_ones(1, 1, dtype=torch.float32) if temperature is None else temperature[:, None]
    logprob, logsumexp, entropy, logprob_at = _WholeLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, heat, further, plan
    )
    return HeadColumns(logprob=logprob, logsumexp=logsumexp, entropy=entropy, logprob_at=logprob_at)


class _WholeLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        heat: Tensor,
        ids: Tensor,
        plan: _FullPlan,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = project(hidden, weight)
        chosen = logits.gather(1, torch.cat([labels[:, None], ids], dim=1)).float() / heat
        if plan.wants_entropy:
            logsumexp, entropy = _kernel(_normaliser_and_entropy, plan.is_compiled)(logits, heat)
        else:
            logsumexp = _kernel(_normaliser, plan.is_compiled)(logits, heat)
            entropy = torch.zeros_like(logsumexp)
        ctx.save_for_backward(hidden, weight, labels, heat, ids, logsumexp, entropy)
        # Not saved by autograd: the backward pass writes their gradient over them.
        ctx.logits = logits if any(ctx.needs_input_grad) else None  # type: ignore[attr-defined]
        ctx.plan = plan  # type: ignore[attr-defined]
        if not plan.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen[:, 0] - logsumexp, logsumexp, entropy, chosen[:, 1:] - logsumexp[:, None]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_logprob: Tensor,
        grad_logsumexp: Tensor,
        grad_entropy: Tensor,
        grad_at: Tensor,
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, labels, heat, ids, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        plan: _FullPlan = ctx.plan  # type: ignore[attr-defined]
        logits: Tensor | None = ctx.logits  # type: ignore[attr-defined]
        assert logits is not None, "the logits of this pass were already spent on a backward pass"
        ctx.logits = None  # type: ignore[attr-defined]
        # Every log-prob pushes all of p down, the normaliser pulls it up.
        pull = grad_logsumexp - grad_logprob - grad_at.sum(1)
        slope = grad_entropy if plan.entropy_has_gradient else None
        _kernel(_into_gradient, plan.is_compiled)(logits, heat, logsumexp, pull, labels, grad_logprob, entropy, slope)
        if ids.shape[1] > 0:
            logits.scatter_add_(1, ids, (grad_at / heat).to(logits.dtype))
        return logits @ weight, logits.t() @ hidden, None, None, None, None


@cache
def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    # Any number of rows: micro-batches differ in it.
    made: Callable[P, T] = torch.compile(function, dynamic=True)
    return made


def _kernel(function: Callable[P, T], is_compiled: bool) -> Callable[P, T]:
    return _compiled(function) if is_compiled else function


def _normaliser(logits: Tensor, heat: Tensor) -> Tensor:
    """[N] log of the normaliser of logits [N, V]."""
    return torch.logsumexp(logits.float() / heat, dim=1)


def _normaliser_and_entropy(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """[N] log of the normaliser, and [N] entropy."""
    tempered = logits.float() / heat
    largest = tempered.amax(1, keepdim=True)
    shifted = tempered - largest
    weights = torch.exp(shifted)
    total = weights.sum(1)
    log_total = total.log()
    return log_total + largest[:, 0], log_total - (weights * shifted).sum(1) / total


def _into_gradient(
    logits: Tensor,
    heat: Tensor,
    logsumexp: Tensor,
    pull: Tensor,
    labels: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Replace logits [N, V] by their gradient."""
    logprobs = logits.float() / heat - logsumexp[:, None]
    factor = pull[:, None] if grad_entropy is None else pull[:, None] - grad_entropy[:, None] * (logprobs + entropy[:, None])
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    grad = logprobs.exp() * factor + torch.where(is_label, grad_logprob[:, None], 0.0)
    logits.copy_(grad / heat)
