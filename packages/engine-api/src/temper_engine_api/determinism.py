"""Reproducible numbers: deterministic kernels, and a linear layer with batch-invariant results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as functional
from torch import Tensor

from temper_engine_api.errors import ConfigError

BATCH_INVARIANT_MIN_ROWS = 16
"""Rows to which `batch_invariant_linear` pads: kernels for few rows sum in another order (seen on
CPUs below 4 rows)."""


@contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Allow only deterministic kernels inside the context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_deterministic_environment(device: torch.device) -> None:
    """Check that cuBLAS is configured for deterministic results.

    Raises:
        ConfigError: If the device is CUDA and CUBLAS_WORKSPACE_CONFIG is not set.
    """
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (
        ":4096:8",
        ":16:8",
    ):
        raise ConfigError(
            "deterministic is on, but CUBLAS_WORKSPACE_CONFIG is not set, and cuBLAS is "
            "nondeterministic without it: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process "
            "starts."
        )


def batch_invariant_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute `hidden @ weight.T` so that a row has the same bits for any number of rows.

    Evaluation computes more positions of a micro-batch than training does. If a rank has only a
    few, the plain product can give a position two different log-probs, and then the on-policy
    ratio is not exactly 1.

    Args:
        hidden: [N, D].
        weight: [V, D] in the same dtype.

    Returns:
        [N, V] in the same dtype.
    """
    size = hidden.shape[0]
    if size >= BATCH_INVARIANT_MIN_ROWS:
        return hidden @ weight.t()
    return (functional.pad(hidden, (0, 0, 0, BATCH_INVARIANT_MIN_ROWS - size)) @ weight.t())[:size]
