"""What the environment must hold before a process may promise the same bits twice."""

import os

import torch

from temper_engine_api.errors import ConfigError


def check_deterministic_environment(device: torch.device) -> None:
    """Refuse deterministic CUDA without the workspace setting that cuBLAS needs for it.

    Raises:
        ConfigError: CUBLAS_WORKSPACE_CONFIG is not set.
    """
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise ConfigError(
            "deterministic is on, but cuBLAS is deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment: "
            "set it before the process starts."
        )
