"""Deterministic kernels: switch them on for a while, and check that CUDA is configured for them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from temper_engine_api.errors import ConfigError


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
