"""What the environment must hold before a process may promise the same bits twice."""

import pytest
import torch

from temper_engine_api.determinism import check_deterministic_environment
from temper_engine_api.errors import ConfigError


def test_deterministic_cuda_without_the_cublas_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        check_deterministic_environment(torch.device("cuda"))
    check_deterministic_environment(torch.device("cpu"))
