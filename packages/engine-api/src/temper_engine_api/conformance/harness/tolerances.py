"""How near two numbers must be, each with its reason, and the comparison that all laws use."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from temper_engine_api.training_specs import Compute
from temper_engine_api.weights import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest distance, as a share of the largest entry of what is expected."""

    relative: float
    """Of the largest magnitude."""
    reason: str
    """Why so much and not less."""
    relative_bf16: float | None = None
    """The share where the engine is held to the laws in bf16; None is the same one."""

    @property
    def allowed(self) -> float:
        """The share in what the engine is held to the laws in."""
        return (
            self.relative
            if self.relative_bf16 is None or _COMPUTE.get() != "bf16"
            else self.relative_bf16
        )


_COMPUTE: ContextVar[Compute] = ContextVar("compute", default="fp32")


@contextmanager
def use_tolerances_for(compute: Compute) -> Iterator[None]:
    """Inside, distances are judged by what the engine computes in."""
    token = _COMPUTE.set(compute)
    try:
        yield
    finally:
        _COMPUTE.reset(token)


EXACT = Tolerance(relative=0.0, reason="the same operations on the same numbers in the same order")
GRADIENT = Tolerance(
    relative=1e-5,
    reason="float32 sums over some hundred terms of both signs in another order: roundings of 6e-8 each",
    relative_bf16=0.25,
)
"""In bf16 the whole gradient is 2 to 4 % off, and the largest entry of a bias, which is what cancellation leaves, 19 %."""
LOGPROB = Tolerance(
    relative=3e-6,
    reason="float32 logits of hidden size 32 through four layers, summed in another order",
    relative_bf16=5e-2,
)
PEAKED = Tolerance(
    relative=3e-5,
    reason="as LOGPROB, where a log-sum-exp cancels logits twenty times as large",
    relative_bf16=0.6,
)
"""In bf16 logits of 60 are 0.2 off, and the entropy of a distribution with two peaks is what lies between them."""
LOSS = Tolerance(
    relative=3e-6,
    reason="float32 sums over micro-batches and four ranks in another order; the oracle's own are up to 5e-7 from a float64 model's, "
    "and LOGPROB allows each term five times as much",
    relative_bf16=5e-2,
)
SAME_PLAN = {
    "cpu": EXACT,
    "cuda": Tolerance(
        relative=1e-6,
        reason="evaluation answers more positions than training, and CUDA's kernels are chosen by their number",
        relative_bf16=5e-2,
    ),
}
"""Of log-probs that are computed twice with one plan, by device."""
LOSS_TERM_SCALE = 1.0
"""Size of the terms that a loss is the mean of: where they nearly cancel, rounding is a share of them, not of what is left."""
SMALL_TENSOR_FRACTION = 0.03
"""Share of the largest gradient below which a tensor's own size no longer counts: that of a key bias is nothing but cancellation."""
UPDATE = Tolerance(
    relative=2e-5,
    reason="AdamW divides by the root of the second moment, which enlarges a gradient's relative error",
    relative_bf16=0.25,
)
BF16_TOTAL_ERROR = 0.1
"""Of all tensors together, by their norm: single entries are further off, but a factor or a token that is left out shows here."""
BF16 = Tolerance(
    relative=5e-2, reason="bf16 keeps 8 bits: 4e-3 an operation, about ten operations deep"
)


def assert_close(
    actual: Tensor | float,
    expected: Tensor | float,
    tolerance: Tolerance,
    *,
    what: str,
    min_scale: float = 0.0,
) -> None:
    """Fail unless every entry is within the tolerance of what is expected; NaN is never close.

    Args:
        actual: measured.
        expected: of the same shape.
        tolerance: a share of the largest entry expected.
        what: for the message.
        at_least: the tolerance is a share of this where the largest entry is smaller.
    """
    have, want = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert have.shape == want.shape, (
        f"{what} has shape {tuple(have.shape)}, expected {tuple(want.shape)}"
    )
    if not want.numel():
        return
    scale, distance = max(float(want.abs().max()), min_scale), float((have - want).abs().max())
    assert distance <= tolerance.allowed * scale, (
        f"{what} is off by {distance:.3e}, {distance / scale if scale else float('inf'):.1e} of its scale {scale:.3e}; "
        f"allowed is {tolerance.allowed:.0e} ({tolerance.reason if tolerance.allowed == tolerance.relative else BF16.reason})"
    )


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance, *, what: str
) -> None:
    """Fail unless both hold the same names and every tensor is within the tolerance; what is expected must not be all zero."""
    assert actual.keys() == expected.keys(), (
        f"{what}: names differ by {sorted(actual.keys() ^ expected.keys())}"
    )
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0, f"{what}: everything expected is zero"
    for name, tensor in expected.items():
        assert_close(
            actual[name],
            tensor,
            tolerance,
            what=f"{what} of {name}",
            min_scale=SMALL_TENSOR_FRACTION * largest,
        )
    if tolerance.allowed != tolerance.relative:
        distance, norm = (
            _norm(tensors)
            for tensors in (
                [actual[name].double() - expected[name] for name in expected],
                expected.values(),
            )
        )
        assert distance <= BF16_TOTAL_ERROR * norm, (
            f"{what} is off by {distance / norm:.1e} of its norm; allowed is {BF16_TOTAL_ERROR:.0e}"
        )


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def assert_all_equal(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, what: str
) -> None:
    """Fail unless both hold the same names and the same bits."""
    assert actual.keys() == expected.keys(), (
        f"{what}: names differ by {sorted(actual.keys() ^ expected.keys())}"
    )
    unequal = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not unequal, (
        f"{what}: not bitwise equal: {', '.join(unequal[:5])} ({len(unequal)} of {len(expected)})"
    )


def assert_same_state(
    actual: Mapping[str, TrainingState], expected: Mapping[str, TrainingState]
) -> None:
    """Fail unless both are the same portable state, bit for bit and count for count."""
    for part in ("master", "first_moment", "second_moment"):
        read = attrgetter(part)
        have, want = (
            {name: read(entry) for name, entry in state.items()} for state in (actual, expected)
        )
        assert_all_equal(have, want, what=part)
    counts = [
        {name: entry.update_count for name, entry in state.items()} for state in (actual, expected)
    ]
    assert counts[0] == counts[1], "update counts differ"
