"""Determinism, set for the whole process only while the engine computes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from temper_engine_api.errors import ConfigError


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels whose result does not depend on timing inside, the caller's setting again outside."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_deterministic_environment(device: torch.device) -> None:
    """Refuse deterministic CUDA without the workspace setting that cuBLAS needs for it.

    Raises:
        ConfigError: CUBLAS_WORKSPACE_CONFIG is not set.
    """
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (
        ":4096:8",
        ":16:8",
    ):
        raise ConfigError(
            "deterministic is on, but cuBLAS is deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment: "
            "set it before the process starts."
        )
