"""Tests of determinism.py."""

import pytest
import torch

from temper_engine_api.determinism import (
    check_deterministic_environment,
    use_deterministic_algorithms,
)
from temper_engine_api.errors import ConfigError


def test_deterministic_cuda_without_the_cublas_workspace_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        check_deterministic_environment(torch.device("cuda"))
    check_deterministic_environment(torch.device("cpu"))


def test_setting_is_restored_after_an_exception() -> None:
    def fail_inside() -> None:
        with use_deterministic_algorithms():
            assert torch.are_deterministic_algorithms_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not torch.are_deterministic_algorithms_enabled()
