"""Log-probs, entropies and log-normalizers of tokens from hidden states.

`chunked_logprobs` never holds all logits. It processes chunks of positions, keeps only the
log-normalizer (and the entropy if it has a gradient), and recomputes the logits of each chunk in
the backward pass. `full_logprobs` keeps all logits of a micro-batch in the compute dtype and is
faster if they fit.

With logits z = h W^T / temperature and p = softmax(z):
d logsumexp / dz = p; d log p_y / dz = 1_y - p; dH / dz = -p (log p + H).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from temper_engine_api.determinism import BATCH_INVARIANT_MIN_ROWS, batch_invariant_linear

CPU_CHUNK_BYTES = 128 << 20
CUDA_CHUNK_BYTES = 1 << 30
CPU_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Float32 outputs for N positions."""

    logprob: Tensor
    """[N] log-prob of the label."""
    logsumexp: Tensor
    """[N] log-normalizer, after temperature."""
    entropy: Tensor
    """[N] entropy; zeros if not requested."""
    extra_logprobs: Tensor
    """[N, K] log-probs of extra token ids; K is 0 if none are requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkedOptions:
    """Options of one call."""

    chunk: int
    needs_entropy: bool
    entropy_has_gradient: bool
    softcap: float | None


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | None = None,
    extra_ids: Tensor | None = None,
    needs_entropy: bool = False,
    entropy_has_gradient: bool = False,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> TokenLogprobs:
    """Compute log-probs of labels without holding all logits. Differentiable once.

    Args:
        hidden: [N, D] in the compute dtype.
        weight: [V, D] output projection without bias, in the compute dtype.
        labels: [N] int64 below V.
        temperature: [N] float32 divisor of the logits; None means 1.
        extra_ids: [N, K] int64 ids below V of other tokens whose log-probs are returned too; None
            means none.
        needs_entropy: Compute the entropy.
        entropy_has_gradient: The entropy is part of a loss; if False, the backward pass is cheaper.
        chunk_tokens: Positions per chunk; None fits CPU_CHUNK_BYTES or CUDA_CHUNK_BYTES.
        softcap: Limit c of the logits, which become c tanh(logits / c) before the temperature; None
            means none.

    Returns:
        Float32 outputs. Matmuls run in the compute dtype, everything after them in float32.
    """
    options = _ChunkedOptions(
        chunk=chunk_tokens or _default_chunk(weight),
        needs_entropy=needs_entropy,
        entropy_has_gradient=entropy_has_gradient,
        softcap=softcap,
    )
    extra_ids = labels.new_empty(labels.shape[0], 0) if extra_ids is None else extra_ids
    # Autograd functions take tensors only: an empty one stands for a temperature of 1.
    temperatures = (
        hidden.new_empty(0, 1, dtype=torch.float32) if temperature is None else temperature[:, None]
    )
    logprob, logsumexp, entropy, extra_logprobs = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperatures, extra_ids, options
    )
    return TokenLogprobs(
        logprob=logprob, logsumexp=logsumexp, entropy=entropy, extra_logprobs=extra_logprobs
    )


def _default_chunk(weight: Tensor) -> int:
    budget = CUDA_CHUNK_BYTES if weight.device.type == "cuda" else CPU_CHUNK_BYTES
    return max(16, budget // (4 * weight.shape[0]))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        extra_ids: Tensor,
        options: _ChunkedOptions,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = hidden.shape[0]
        logprob, logsumexp, entropy = (
            hidden.new_zeros(size, dtype=torch.float32) for _ in range(3)
        )
        extra_logprobs = hidden.new_zeros(extra_ids.shape, dtype=torch.float32)
        logits_buffer = _buffer(size, options=options, weight=weight)
        for rows in _chunks(size, options.chunk):
            logits = _logits(
                hidden[rows],
                weight,
                temperatures=temperatures[rows],
                softcap=options.softcap,
                out=logits_buffer,
            )
            chosen = logits.gather(1, torch.cat([labels[rows, None], extra_ids[rows]], dim=1))
            if options.needs_entropy:
                log_total = _logsumexp_with_entropy_(logits, entropy=entropy[rows])
            else:
                log_total = _logsumexp_(logits)
            logsumexp[rows] = log_total
            logprob[rows] = chosen[:, 0] - log_total
            extra_logprobs[rows] = chosen[:, 1:] - log_total[:, None]
        ctx.save_for_backward(hidden, weight, labels, temperatures, extra_ids, logsumexp, entropy)
        ctx.options = options  # type: ignore[attr-defined]
        # The backward pass then sees that the loss does not differentiate the entropy, as when an
        # objective only reports it.
        ctx.set_materialize_grads(False)
        if not options.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, logsumexp, entropy, extra_logprobs

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_logprob: Tensor | None,
        grad_logsumexp: Tensor | None,
        grad_entropy: Tensor | None,
        grad_extra: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, labels, temperatures, extra_ids, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        options: _ChunkedOptions = ctx.options  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden)
        # float32: the sum over many chunks would lose digits in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_logprob, grad_logsumexp, grad_extra = (
            torch.zeros_like(like, dtype=torch.float32) if grad is None else grad
            for grad, like in (
                (grad_logprob, logsumexp),
                (grad_logsumexp, logsumexp),
                (grad_extra, extra_ids),
            )
        )
        # Sum of the factors of p in dz: +1 per log-normalizer, -1 per log-prob.
        prob_coeff = grad_logsumexp - grad_logprob - grad_extra.sum(1)
        buffer = _buffer(hidden.shape[0], options=options, weight=weight)
        for rows in _chunks(hidden.shape[0], options.chunk):
            logits = _logits(
                hidden[rows],
                weight,
                temperatures=temperatures[rows],
                softcap=options.softcap,
                out=buffer,
            )
            slope = _softcap_slope(logits, temperatures=temperatures[rows], softcap=options.softcap)
            logits.sub_(logsumexp[rows, None])
            if grad_entropy is not None:
                entropy_coeff = _entropy_coefficient(
                    logits, grad=grad_entropy[rows], entropy=entropy[rows]
                )
                grad = logits.exp_().mul_(entropy_coeff.add_(prob_coeff[rows, None]))
            else:
                grad = logits.exp_().mul_(prob_coeff[rows, None])
            grad.scatter_add_(1, labels[rows, None], grad_logprob[rows, None])
            grad.scatter_add_(1, extra_ids[rows], grad_extra[rows])
            if temperatures.numel() > 0:
                grad.div_(temperatures[rows])
            if slope is not None:
                grad.mul_(slope)
            _accumulate(
                grad.to(weight.dtype),
                hidden[rows],
                weight,
                grad_hidden=grad_hidden[rows],
                grad_weight=grad_weight,
            )
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, size)) for first in range(0, size, chunk)]


def _buffer(size: int, *, options: _ChunkedOptions, weight: Tensor) -> Tensor:
    """Allocate logits of one chunk, reused for every chunk.

    On a CPU, page faults of fresh memory cost more than the computation.
    """
    return torch.empty(
        min(size, options.chunk), weight.shape[0], dtype=torch.float32, device=weight.device
    )


def _logits(
    hidden: Tensor, weight: Tensor, *, temperatures: Tensor, softcap: float | None, out: Tensor
) -> Tensor:
    """Return [C, V] float32 logits in the first rows of `out`."""
    logits = out[: hidden.shape[0]]
    # Small matmuls use another CPU kernel, with results that depend on the row count.
    if weight.dtype == torch.float32 and hidden.shape[0] >= BATCH_INVARIANT_MIN_ROWS:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(batch_invariant_linear(hidden, weight))
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperatures) if temperatures.numel() > 0 else logits


def _softcap_slope(logits: Tensor, *, temperatures: Tensor, softcap: float | None) -> Tensor | None:
    """Return [C, V] d capped / d logit = 1 - tanh^2 from capped logits; None without a cap."""
    if softcap is None:
        return None
    tanh = logits / softcap
    if temperatures.numel() > 0:
        tanh.mul_(temperatures)
    return tanh.square_().neg_().add_(1.0)


def _logsumexp_(logits: Tensor) -> Tensor:
    """Return the [C] log-normalizer; overwrites the logits."""
    parts = []
    # In the same chunks as with the entropy: torch sums a single long row with several threads, so
    # the number of rows changes a sum's bits.
    for rows in _cached_rows(logits):
        # Subtracted first, so that exp cannot overflow.
        largest = logits[rows].amax(1, keepdim=True)
        shifted = logits[rows].sub_(largest)
        parts.append(shifted.exp_().sum(1).log_().add_(largest[:, 0]))
    return torch.cat(parts)


def _cached_rows(logits: Tensor) -> list[slice]:
    """Return row slices that stay in the CPU cache; on other devices, all rows.

    With 8192 tokens the entropy then adds 16 % to the time on a CPU, instead of 180 %.
    """
    size, vocab_size = logits.shape
    num_rows = max(1, CPU_CACHE_BYTES // (4 * vocab_size)) if logits.device.type == "cpu" else size
    return _chunks(size, num_rows)


def _logsumexp_with_entropy_(logits: Tensor, *, entropy: Tensor) -> Tensor:
    """Return the [C] log-normalizer and fill entropy [C]; overwrites the logits."""
    log_total = torch.empty_like(entropy)
    all_rows = _cached_rows(logits)
    scratch = torch.empty_like(logits[all_rows[0]])
    for rows in all_rows:
        largest = logits[rows].amax(1, keepdim=True)
        shifted = logits[rows].sub_(largest)
        weights = torch.exp(shifted, out=scratch[: len(shifted)])
        total = weights.sum(1)
        log_sum = total.log()
        # H = log Z - E[z]; the shift by the largest logit cancels in the difference.
        entropy[rows] = log_sum - weights.mul_(shifted).sum(1) / total
        log_total[rows] = log_sum.add_(largest[:, 0])
    return log_total


def _entropy_coefficient(logprobs: Tensor, *, grad: Tensor, entropy: Tensor) -> Tensor:
    """Return [C, V] -(log p + H) * upstream gradient, the factor of p in the entropy's gradient."""
    return logprobs.add(entropy[:, None]).mul_(-grad[:, None])


def _accumulate(
    grad: Tensor, hidden: Tensor, weight: Tensor, *, grad_hidden: Tensor, grad_weight: Tensor
) -> None:
    torch.mm(grad, weight, out=grad_hidden)
    if weight.dtype == torch.float32:
        grad_weight.addmm_(grad.t(), hidden)
    else:
        # `addmm_` needs equal dtypes, so each chunk's product is rounded once and then summed in
        # float32.
        grad_weight.add_(grad.t() @ hidden)


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FullOptions:
    """Options of one call."""

    needs_entropy: bool
    entropy_has_gradient: bool
    uses_compile: bool


def full_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | None = None,
    extra_ids: Tensor | None = None,
    needs_entropy: bool = False,
    entropy_has_gradient: bool = False,
    uses_compile: bool = False,
) -> TokenLogprobs:
    """Compute the outputs of `chunked_logprobs`, but store all logits, in the compute dtype.

    Nothing is computed twice, and nothing as large as the logits exists in float32. The backward
    pass overwrites the logits, so it can run only once.

    Args:
        hidden: [N, D] in the compute dtype.
        weight: [V, D] output projection.
        labels: [N] int64.
        temperature: [N] divisor of the logits; None means 1.
        extra_ids: [N, K] ids of other tokens whose log-probs are returned too; None means none.
        needs_entropy: Compute the entropy.
        entropy_has_gradient: The entropy is part of a loss.
        uses_compile: Compile each elementwise pass to one kernel.
    """
    options = _FullOptions(
        needs_entropy=needs_entropy,
        entropy_has_gradient=entropy_has_gradient,
        uses_compile=uses_compile,
    )
    extra_ids = labels.new_empty(labels.shape[0], 0) if extra_ids is None else extra_ids
    temperatures = (
        hidden.new_ones(1, 1, dtype=torch.float32) if temperature is None else temperature[:, None]
    )
    logprob, logsumexp, entropy, extra_logprobs = _FullLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperatures, extra_ids, options
    )
    return TokenLogprobs(
        logprob=logprob, logsumexp=logsumexp, entropy=entropy, extra_logprobs=extra_logprobs
    )


class _FullLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        extra_ids: Tensor,
        options: _FullOptions,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # A log-prob must have the same bits however many positions of the micro-batch are
        # requested.
        logits = batch_invariant_linear(hidden, weight)
        chosen = (
            logits.gather(1, torch.cat([labels[:, None], extra_ids], dim=1)).float() / temperatures
        )
        if options.needs_entropy:
            logsumexp, entropy = _maybe_compiled(_logsumexp_and_entropy, options.uses_compile)(
                logits, temperatures
            )
        else:
            logsumexp = _maybe_compiled(_logsumexp, options.uses_compile)(logits, temperatures)
            entropy = torch.zeros_like(logsumexp)
        ctx.save_for_backward(hidden, weight, labels, temperatures, extra_ids, logsumexp, entropy)
        # The logits are not saved with save_for_backward, because the backward pass overwrites them
        # with their gradient.
        ctx.logits = logits if any(ctx.needs_input_grad) else None  # type: ignore[attr-defined]
        ctx.options = options  # type: ignore[attr-defined]
        # The backward pass then sees that the loss does not differentiate the entropy, as when an
        # objective only reports it.
        ctx.set_materialize_grads(False)
        if not options.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen[:, 0] - logsumexp, logsumexp, entropy, chosen[:, 1:] - logsumexp[:, None]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_logprob: Tensor | None,
        grad_logsumexp: Tensor | None,
        grad_entropy: Tensor | None,
        grad_extra: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, labels, temperatures, extra_ids, logsumexp, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        options: _FullOptions = ctx.options  # type: ignore[attr-defined]
        logits: Tensor | None = ctx.logits  # type: ignore[attr-defined]
        assert logits is not None, "full_logprobs keeps logits for one backward pass only"
        # Drop the reference, so that a second backward pass fails instead of reading gradients as
        # logits.
        ctx.logits = None  # type: ignore[attr-defined]
        grad_logprob, grad_logsumexp, grad_extra = (
            torch.zeros_like(like, dtype=torch.float32) if grad is None else grad
            for grad, like in (
                (grad_logprob, logsumexp),
                (grad_logsumexp, logsumexp),
                (grad_extra, extra_ids),
            )
        )
        # Sum of the factors of p in dz: +1 per log-normalizer, -1 per log-prob.
        prob_coeff = grad_logsumexp - grad_logprob - grad_extra.sum(1)
        _maybe_compiled(_replace_with_gradient, options.uses_compile)(
            logits,
            temperatures,
            logsumexp,
            prob_coeff,
            labels,
            grad_logprob,
            entropy,
            grad_entropy,
        )
        if extra_ids.shape[1] > 0:
            logits.scatter_add_(1, extra_ids, (grad_extra / temperatures).to(logits.dtype))
        return logits @ weight, logits.t() @ hidden, None, None, None, None


@cache
def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    # dynamic: the row count differs between micro-batches.
    compiled: Callable[P, T] = torch.compile(function, dynamic=True)
    return compiled


def _maybe_compiled(function: Callable[P, T], uses_compile: bool) -> Callable[P, T]:
    return _compiled(function) if uses_compile else function


def _logsumexp(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the [N] log-normalizer of logits [N, V]."""
    # torch.logsumexp would not give the same bits as `_logsumexp_and_entropy`.
    tempered = logits.float() / temperatures
    largest = tempered.amax(1, keepdim=True)
    return torch.exp(tempered - largest).sum(1).log() + largest[:, 0]


def _logsumexp_and_entropy(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the [N] log-normalizer and the [N] entropy."""
    tempered = logits.float() / temperatures
    largest = tempered.amax(1, keepdim=True)
    shifted = tempered - largest
    weights = torch.exp(shifted)
    total = weights.sum(1)
    log_total = total.log()
    return log_total + largest[:, 0], log_total - (weights * shifted).sum(1) / total


def _replace_with_gradient(
    logits: Tensor,
    temperatures: Tensor,
    logsumexp: Tensor,
    prob_coeff: Tensor,
    labels: Tensor,
    grad_logprob: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite logits [N, V] with their gradient."""
    logprobs = logits.float() / temperatures - logsumexp[:, None]
    factor = (
        prob_coeff[:, None]
        if grad_entropy is None
        else prob_coeff[:, None] - grad_entropy[:, None] * (logprobs + entropy[:, None])
    )
    # A comparison instead of scatter fuses into the elementwise kernel.
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    grad = logprobs.exp() * factor + torch.where(is_label, grad_logprob[:, None], 0.0)
    logits.copy_(grad / temperatures)
