"""Test that process-wide settings are scoped, and the fast matmul is used only if exact."""

from collections.abc import Callable

import pytest
import torch

from temper_engine_api.specs import PrecisionSpec
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.runtime import numerics


def test_the_matmul_precision_is_put_back_after_an_exception() -> None:
    def fail_inside() -> None:
        with numerics.use_matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
            raise KeyError

    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError):
        fail_inside()
    assert torch.get_float32_matmul_precision() == before


def test_fast_matmul_check_accepts_float32_precision_only() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(200, 256, generator=generator), torch.randn(256, 200, generator=generator)
    exact = a.double() @ b.double()
    with numerics.use_matmul_precision("medium" if numerics.is_fast_matmul_exact() else "highest"):
        error = float((a @ b - exact).abs().max() / exact.abs().max())
    # float32 keeps 24 bits and 256 terms are summed; bf16 keeps 8 bits, an error of 1e-3.
    assert error < 2e-6


@pytest.mark.parametrize("has_kernels", [True, False])
def test_16_bits_on_a_cpu_without_kernels_warn_once(
    has_kernels: bool,
    start: Callable[..., FSDPEngine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numerics.warn_if_slow_on_cpu.cache_clear()
    monkeypatch.setattr(
        numerics, "has_cpu_kernels", lambda compute: has_kernels or compute == "fp32"
    )
    for compute in ("fp32", "bf16", "bf16"):
        start(precision=PrecisionSpec(compute=compute))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (0 if has_kernels else 1)
    assert all(
        "precision.compute is bf16" in line and "set precision.compute=fp32" in line
        for line in messages
    )
