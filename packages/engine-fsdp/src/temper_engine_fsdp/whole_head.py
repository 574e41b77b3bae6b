"""The language head with all logits of a micro-batch in memory, in the compute dtype: faster than ``fused_head`` where they fit.

One product makes the logits, one kernel reads them for the normaliser and the entropy, one turns them into their gradient in place, and
two products carry it on: nothing is computed twice, and nothing of the logits' size exists in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from temper_engine_api.projection import project
from temper_engine_fsdp.fused_head import HeadColumns

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
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
    plan = _Plan(wants_entropy=wants_entropy, entropy_has_gradient=entropy_has_gradient, is_compiled=is_compiled)
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
        plan: _Plan,
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
        plan: _Plan = ctx.plan  # type: ignore[attr-defined]
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
