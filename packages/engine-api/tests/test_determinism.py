"""Test deterministic kernels and the batch-invariant linear layer."""

import pytest
import torch

from temper_engine_api.determinism import (
    batch_invariant_linear,
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


@pytest.mark.bitwise
@pytest.mark.parametrize("width", [16, 48, 896])
def test_row_has_the_same_bits_for_any_number_of_rows(width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, width, generator=draw), torch.randn(101, width, generator=draw)
    product = batch_invariant_linear(hidden, weight)
    for size in range(41):
        assert torch.equal(batch_invariant_linear(hidden[:size], weight), product[:size]), size


def test_gradients_of_padded_rows_are_those_of_the_product() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for size in (3, 5)
    )
    assert torch.autograd.gradcheck(batch_invariant_linear, (hidden, weight))
