"""Tolerances of the conformance tests, each with its reason, and the comparisons that use them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.diagnosis import (
    describe_sequence_errors,
    describe_tensor_errors,
    describe_token_errors,
)
from temper_engine_api.specs import Compute
from temper_engine_api.weights import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest allowed difference, relative to the largest magnitude of the expected values."""

    relative: float
    reason: str
    """Reason why a difference may be this large."""
    relative_bf16: float | None = None
    """Value for bf16 compute; None is the same value."""

    @property
    def allowed(self) -> float:
        """The allowed relative difference with the compute dtype of the engine under test."""
        return (
            self.relative
            if self.relative_bf16 is None or _COMPUTE.get() != "bf16"
            else self.relative_bf16
        )


# Set by the fixture engine_under_test, so that tests need not pass the dtype to each comparison.
_COMPUTE: ContextVar[Compute] = ContextVar("compute", default="fp32")


@contextmanager
def use_tolerances_for(compute: Compute) -> Iterator[None]:
    """Compare with the tolerances of a compute dtype inside the context."""
    token = _COMPUTE.set(compute)
    try:
        yield
    finally:
        _COMPUTE.reset(token)


EXACT = Tolerance(relative=0.0, reason="the same operations on the same numbers in the same order")
GRADIENT = Tolerance(
    relative=1e-5,
    reason="float32 sums of hundreds of terms of both signs in another order; 6e-8 per rounding",
    relative_bf16=0.25,
)
"""Measured in bf16: 2 to 4 % for the full gradient, 19 % for a bias, whose terms mostly cancel."""
LONG_GRADIENT = Tolerance(
    relative=5e-5,
    reason="as GRADIENT, over 800 tokens instead of 60; the gradient of a key bias is the small "
    "remainder of terms that cancel",
    relative_bf16=0.25,
)
_LINEAR_ATTENTION_GRADIENTS = {
    "qwen3_next": 3e-5,
    "qwen3_5_text": 1e-4,
    "qwen3_5_moe_text": 2e-4,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 2e-4,
}
"""Tolerance by family with gated linear attention.

Measured relative to float64, with the largest entry of a tensor as the scale: transformers is off
by 9e-6, 8e-6 and 2e-5, FSDPEngine by 1.1e-5, 2.4e-5 and 4e-5, and by at most 2.6e-5 without the
float32 matmul kernels that it selects on CPUs. The two differ by up to 1e-5, 4e-5 and 6e-5, and by
at most 4e-6 in the other families.
"""


def get_family_gradient(family: str) -> Tolerance:
    """Return the gradient tolerance for a family in `model_families`."""
    if family == "gemma2":
        # Soft-capping leaves small gradients: an entry that transformers computes in bf16 is off
        # by 0.37 of its tensor's largest.
        return replace(GRADIENT, relative_bf16=0.5)
    if family not in _LINEAR_ATTENTION_GRADIENTS:
        return GRADIENT
    return Tolerance(
        relative=_LINEAR_ATTENTION_GRADIENTS[family],
        reason="as GRADIENT, through states of linear attention and a norm of their outputs, which "
        "is large where these are small",
        relative_bf16=0.25,
    )


def get_family_logprob(family: str) -> Tolerance:
    """Return the tolerance for log-probs and entropies of a family in `model_families`."""
    if family == "qwen3_5_moe":
        # Linear attention divides its output by its norm, which enlarges the rounding of a small
        # output. At one token of the kit's batch transformers in bf16 is off by 0.065 of the
        # largest entropy, FSDPEngine by 0.08, and transformers with these layers in float32 by
        # 0.006.
        return replace(LOGPROB, relative_bf16=0.1)
    return LOGPROB


LOGPROB = Tolerance(
    relative=3e-6,
    reason="float32 logits of hidden size 32 through four layers, summed in another order",
    relative_bf16=5e-2,
)
SAME_LOGITS = Tolerance(
    relative=1e-4,
    reason="a sum of a log-prob and a log-sum-exp, both in float32, cancels to a smaller logit",
)
"""A thirtieth of the smallest error from rounding any of the test's temperatures to bf16."""
PEAKED = Tolerance(
    relative=3e-5,
    reason="as LOGPROB, where a log-sum-exp cancels logits twenty times as large",
    relative_bf16=0.6,
)
"""Rounding logits near 60 to bf16 changes them by 0.2, enough to change the entropy of two
tokens."""
LOSS = Tolerance(
    relative=3e-6,
    reason="float32 sums over micro-batches and four ranks in another order; the oracle's own "
    "losses are up to 5e-7 from a float64 model's, and LOGPROB allows each term five times as much",
    relative_bf16=5e-2,
)
SAME_PLAN = {
    "cpu": EXACT,
    "cuda": Tolerance(
        relative=1e-6,
        reason="eval computes more positions than training; CUDA kernels depend on their number",
        relative_bf16=5e-2,
    ),
}
"""Tolerance by device for log-probs computed twice with the same plan."""
LOSS_TERM_SCALE = 1.0
"""Magnitude of a loss's terms; if they nearly cancel, rounding is relative to them."""
SMALL_TENSOR_FRACTION = 0.03
"""Tensors below this fraction of the largest gradient are compared on that scale.

The gradient of a key bias, for example, is what is left after large terms cancel.
"""
UPDATE = Tolerance(
    relative=2e-5,
    reason="AdamW divides by the root of the second moment, which amplifies relative errors",
    relative_bf16=0.25,
)
BF16_TOTAL_ERROR = 0.1
"""Allowed error of all tensors together in bf16, relative to their norm.

Single entries may be further off, but a missing factor or token shows in the total.
"""
BF16 = Tolerance(
    relative=5e-2, reason="bf16 keeps 8 bits: 4e-3 an operation, about ten operations deep"
)


def assert_close(
    actual: Tensor | float,
    expected: Tensor | float,
    tolerance: Tolerance,
    *,
    quantity: str,
    min_scale: float = 0.0,
    batch: SequenceBatch | None = None,
    num_ranks: int = 1,
) -> None:
    """Fail unless every entry is within the tolerance; NaN never is.

    Args:
        actual: Measured values.
        expected: Values of the same shape.
        tolerance: Relative to the largest expected magnitude.
        quantity: Name of the values in the message.
        min_scale: Lower bound of the scale that the tolerance is relative to.
        batch: The batch if the values are [T], [T, K] or [B]; then the message says which tokens or
            sequences are wrong.
        num_ranks: Number of data-parallel ranks that computed the batch, for the message.
    """
    difference = _describe_difference(
        actual, expected, tolerance, quantity=quantity, min_scale=min_scale
    )
    if difference is None:
        return
    message, max_error = difference
    if batch is not None:
        describe = (
            describe_token_errors
            if len(torch.as_tensor(expected)) == len(batch.tokens)
            else describe_sequence_errors
        )
        message += " " + describe(
            torch.as_tensor(actual).double(),
            torch.as_tensor(expected).double(),
            max_error=max_error,
            batch=batch,
            num_ranks=num_ranks,
        )
    # The message says more than this function's frame in pytest's traceback.
    __tracebackhide__ = True
    raise AssertionError(message)


def _describe_difference(
    actual: Tensor | float,
    expected: Tensor | float,
    tolerance: Tolerance,
    *,
    quantity: str,
    min_scale: float,
) -> tuple[str, float] | None:
    """Return a sentence and the largest allowed error, or None if every entry is close."""
    actual_values, expected_values = (
        # Use float64, so that the comparison adds no rounding error.
        torch.as_tensor(actual).double(),
        torch.as_tensor(expected).double(),
    )
    assert actual_values.shape == expected_values.shape, (
        f"{quantity} has shape {tuple(actual_values.shape)}, expected "
        f"{tuple(expected_values.shape)}"
    )
    if not expected_values.numel():
        return None
    reason = tolerance.reason if tolerance.allowed == tolerance.relative else BF16.reason
    scale, distance = (
        max(float(expected_values.abs().max()), min_scale),
        float((actual_values - expected_values).abs().max()),
    )
    # The condition is not `distance > ...`, because every comparison with NaN is False and NaN must
    # not count as close.
    if distance <= tolerance.allowed * scale:
        return None
    ratio = distance / scale if scale else math.inf
    message = (
        f"{quantity} differs from the expected values by {distance:.3e}, which is {ratio:.1e} of "
        f"their scale {scale:.3e}; allowed is {tolerance.allowed:.0e} ({reason})."
    )
    return message, tolerance.allowed * scale


def assert_all_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: Tolerance,
    *,
    quantity: str,
) -> None:
    """Compare two mappings of tensors by name; the expected ones must not all be zero."""
    __tracebackhide__ = True
    assert actual.keys() == expected.keys(), (
        f"{quantity}: these names are only in one of the two: "
        f"{sorted(actual.keys() ^ expected.keys())}"
    )
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0, f"{quantity}: all expected values are zero, so the comparison shows nothing"
    differences = {
        name: _describe_difference(
            actual[name],
            tensor,
            tolerance,
            quantity=f"{quantity} of {name}",
            min_scale=SMALL_TENSOR_FRACTION * largest,
        )
        for name, tensor in expected.items()
    }
    wrong = {name: difference for name, difference in differences.items() if difference is not None}
    if wrong:
        # pytest would print all of `wrong` after an assert statement.
        raise AssertionError(
            f"{next(iter(wrong.values()))[0]} "
            f"{describe_tensor_errors(actual, expected, wrong=wrong)}"
        )
    # The tolerances of bf16 are so wide for single entries that a missing token could pass them
    # all.
    if tolerance.allowed != tolerance.relative:
        distance, norm = (
            _norm(tensors)
            for tensors in (
                [actual[name].double() - expected[name] for name in expected],
                expected.values(),
            )
        )
        assert distance <= BF16_TOTAL_ERROR * norm, (
            f"{quantity} is off by {distance / norm:.1e} of its norm; allowed is "
            f"{BF16_TOTAL_ERROR:.0e}"
        )


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def assert_all_equal(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, quantity: str
) -> None:
    """Fail unless both mappings have the same names and the same bits."""
    __tracebackhide__ = True
    assert actual.keys() == expected.keys(), (
        f"{quantity}: these names are only in one of the two: "
        f"{sorted(actual.keys() ^ expected.keys())}"
    )
    unequal = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not unequal, (
        f"{quantity}: not bitwise equal: {', '.join(unequal[:5])} "
        f"({len(unequal)} of {len(expected)})"
    )


def assert_same_state(
    actual: Mapping[str, TrainingState], expected: Mapping[str, TrainingState]
) -> None:
    """Fail unless both portable states are bitwise equal, update counts included."""
    __tracebackhide__ = True
    for field_name in ("master", "first_moment", "second_moment"):
        get_field = attrgetter(field_name)
        actual_values, expected_values = (
            {name: get_field(entry) for name, entry in state.items()}
            for state in (actual, expected)
        )
        assert_all_equal(actual_values, expected_values, quantity=field_name)
    counts = [
        {name: entry.update_count for name, entry in state.items()} for state in (actual, expected)
    ]
    assert counts[0] == counts[1], f"update counts differ: {counts[0]}, expected {counts[1]}"
