"""Compare the engine's two language-model heads with Liger and Cut Cross-Entropy.

Measures numerical errors, time and memory. A policy gradient needs one log-prob per token, whose
gradient is weighted per token with weights that are unknown in the forward pass.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from temper_engine_fsdp.model.token_logprobs import chunked_logprobs, full_logprobs
from tools.gpu.fsdp_timing import RankContext, measure_times

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden states [N, D], a weight [V, D] and labels [N] to log-probs [N]."""
EXACT_ROWS = 1024
"""Number of positions at which a head is compared with float64."""
LIMIT = 0.02
"""Largest relative error of a bf16 gradient that counts as equal."""


def _cut_cross_entropy() -> Head:
    compute = import_module("cut_cross_entropy").linear_cross_entropy
    # By default Cut Cross-Entropy filters out small gradients, which would not be comparable.
    return lambda hidden, weight, labels: (
        -compute(hidden, weight, labels, reduction="none", filter_eps=None)
    )


def _liger() -> Head:
    function = import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction
    return lambda hidden, weight, labels: (
        -function.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "none")[0]
    )


def _wrap_own_head(function: Callable[..., object], **options: object) -> Head:
    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        columns = function(hidden, weight, labels, **options)
        logprob: Tensor = columns.logprob  # type: ignore[attr-defined]
        return logprob

    return head


def _list_heads(context: RankContext) -> Mapping[str, Callable[[], Head]]:
    return {
        "own, chunked": lambda: _wrap_own_head(chunked_logprobs),
        "own, full": lambda: _wrap_own_head(full_logprobs, uses_compile=context.scale.compiles),
        "cut-cross-entropy": _cut_cross_entropy,
        "liger": _liger,
    }


def compare_heads(context: RankContext) -> None:
    """Add a row per head: errors against float64, ms of both passes, and GiB beyond the inputs."""
    scale, shape = context.scale, context.scale.shapes["0.5B"]
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = scale.micro_batch_tokens, shape["hidden_size"], shape["vocab_size"]
    hidden = (
        torch.randn(rows, width, generator=generator)
        .to(scale.device, torch.bfloat16)
        .requires_grad_()
    )
    weight = (
        (0.02 * torch.randn(vocabulary, width, generator=generator))
        .to(scale.device, torch.bfloat16)
        .requires_grad_()
    )
    labels = torch.randint(0, vocabulary, (rows,), generator=generator).to(scale.device)
    upstream = torch.randn(rows, generator=generator).to(scale.device)
    few = slice(0, EXACT_ROWS)
    wide_hidden, wide_weight = (t.detach().double().requires_grad_() for t in (hidden[few], weight))
    exact = torch.log_softmax(wide_hidden @ wide_weight.t(), -1).gather(1, labels[few, None])[:, 0]
    expected = (
        exact.detach(),
        *torch.autograd.grad(exact, (wide_hidden, wide_weight), upstream[few].double()),
    )
    for name, make in _list_heads(context).items():
        row: dict[str, object] = {"job": "heads", "contender": name}
        try:
            head = make()
            part = hidden.detach()[few].clone().requires_grad_()
            logprobs = head(part, weight, labels[few])
            gradients = torch.autograd.grad(
                logprobs, (part, weight), upstream[few].to(logprobs.dtype)
            )
            worst = [
                _relative_error(a, b) for a, b in zip((logprobs, *gradients), expected, strict=True)
            ]
            row |= {
                "errors": worst,
                "equals": max(worst) < LIMIT,
                **_measure_cost(
                    context, partial(_run_pass, head, hidden, weight, labels, upstream)
                ),
            }
        # Third-party kernels fail in many ways; the row records the error and the others still run.
        except (
            ImportError,
            RuntimeError,
            ValueError,
            TypeError,
            AssertionError,
        ) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        context.rows.add(row)


def _run_pass(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> None:
    logprobs = head(hidden, weight, labels)
    torch.autograd.grad(logprobs, (hidden, weight), upstream.to(logprobs.dtype))


def _measure_cost(context: RankContext, run_once: Callable[[], None]) -> dict[str, object]:
    run_once()
    on_cuda = context.scale.device == "cuda"
    initial_bytes = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = measure_times(context.scale, run_once, repeats=5)[2]
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    return {"ms": round(1e3 * seconds, 1), "gib": round((peak - initial_bytes) / 2**30, 2)}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    return float((actual.detach().double() - expected).norm() / expected.norm())
