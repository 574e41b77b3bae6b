"""Process-wide numeric settings of torch, set only while the engine computes: float32 matmul kernels and determinism."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from temper_engine_api.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_ERROR_RATIO = 4.0
"""Root mean square error of the fast kernel over that of the default one: 1 to 2 for another order of summation, 1000 for bf16."""


def is_fast_matmul_exact() -> bool:
    """Whether oneDNN's float32 matmul, which "medium" precision selects on a CPU, is as exact here as the default one.

    On most processors it computes in float32 and is up to 2.4 times faster; where there are bf16 matrix units it rounds to bf16.
    """
    # Libraries turn to matrix units only above some size, so a small product alone would prove nothing.
    return all(_is_exact(rows, inner) for rows, inner in ((96, 384), (512, 1024)))


@cache
def _is_exact(rows: int, inner: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator)
    b = torch.randn(inner, rows, generator=generator)
    exact = a.double() @ b.double()
    with use_matmul_precision("highest"):
        usual = (a @ b - exact).square().mean().sqrt()
    with use_matmul_precision("medium"):
        fast = (a @ b - exact).square().mean().sqrt()
    return bool(fast <= _MAX_ERROR_RATIO * usual)


@contextmanager
def use_matmul_precision(precision: str) -> Iterator[None]:
    """This matmul precision inside, the caller's again outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Only kernels whose result does not depend on timing inside, the caller's setting again outside."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def has_cpu_kernels(compute: str) -> bool:
    """Whether this CPU has matmul kernels for that precision; without them torch falls back to a plain loop of about 1 GFLOP/s."""
    if compute == "fp32":
        return True
    return bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if compute == "bf16"
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


@cache
def warn_if_slow_on_cpu(compute: str) -> None:
    """Say once that this precision is slow on this CPU, where it is."""
    if not has_cpu_kernels(compute):
        logger.warning(
            "precision.compute is %s, but this CPU has no %s instructions, so matrix products run "
            "ten to fifty times slower than in "
            "float32: set precision.compute=fp32, unless it is for the rounding of %s that you run "
            "here.",
            compute,
            compute,
            compute,
        )


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
            "deterministic is on, but cuBLAS is deterministic only with "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment: "
            "set it before the process starts."
        )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Of bf16, fp16 or fp32."""
    return _DTYPES[name]


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Numbers of this seed inside, and after it those that the process would have drawn without it.

    On the CPU, where first values are made: ``torch.manual_seed`` would seed every GPU too, and to keep their states takes memory on each
    of them, also on those of other ranks.
    """
    with torch.random.fork_rng(devices=[]):
        restart_rng(seed)
        yield


def restart_rng(seed: int) -> None:
    """The stream of a seed from its first number, inside ``seeded``."""
    torch.default_generator.manual_seed(seed)
