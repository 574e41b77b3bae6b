"""How near two numbers must be, each with its reason, and the comparison that all laws use."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest distance, as a share of the largest entry of what is expected."""

    share: float
    """Of the largest magnitude."""
    reason: str
    """Why so much and not less."""


EXACT = Tolerance(share=0.0, reason="the same operations on the same numbers in the same order")
GRADIENT = Tolerance(share=5e-6, reason="float32 sums over a few hundred terms in another order: some ten roundings of 6e-8 each")
LOGPROB = Tolerance(share=3e-6, reason="float32 logits of hidden size 32 through two layers, summed in another order")
PEAKED = Tolerance(share=1e-5, reason="as LOGPROB, where a log-sum-exp cancels logits twenty times as large")
LOSS = Tolerance(share=2e-6, reason="one float32 number summed over micro-batches and ranks in another order")
UPDATE = Tolerance(share=2e-5, reason="AdamW divides by the root of the second moment, which enlarges a gradient's relative error")
BF16 = Tolerance(share=5e-2, reason="bf16 keeps 8 bits: 4e-3 an operation, about ten operations deep")


def assert_close(actual: Tensor | float, expected: Tensor | float, tolerance: Tolerance, *, what: str) -> None:
    """Fail unless every entry is within the tolerance of what is expected; NaN is never close."""
    have, want = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert have.shape == want.shape, f"{what} has shape {tuple(have.shape)}, expected {tuple(want.shape)}"
    scale = float(want.abs().max()) if want.numel() else 0.0
    distance = float((have - want).abs().max()) if want.numel() else 0.0
    assert distance <= tolerance.share * scale, (
        f"{what} is off by {distance:.3e} where {scale:.3e} is the largest entry, "
        f"{distance / scale if scale else float('inf'):.1e} of it; allowed is {tolerance.share:.0e} ({tolerance.reason})"
    )


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance, *, what: str) -> None:
    """Fail unless both hold the same names and every tensor is within the tolerance; what is expected must not be all zero."""
    assert actual.keys() == expected.keys(), f"{what}: names differ by {sorted(actual.keys() ^ expected.keys())}"
    assert any(bool((tensor != 0).any()) for tensor in expected.values()), f"{what}: everything expected is zero"
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, tolerance, what=f"{what} of {name}")


def assert_all_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, what: str) -> None:
    """Fail unless both hold the same names and the same bits."""
    assert actual.keys() == expected.keys(), f"{what}: names differ by {sorted(actual.keys() ^ expected.keys())}"
    unequal = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not unequal, f"{what}: not bitwise equal: {', '.join(unequal[:5])} ({len(unequal)} of {len(expected)})"
