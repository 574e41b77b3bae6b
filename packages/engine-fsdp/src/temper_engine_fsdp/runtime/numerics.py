"""Numeric settings of torch: dtypes, matmul precision and seeds."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

logger = logging.getLogger(__name__)

_MAX_ERROR_RATIO = 4.0
"""Largest accepted RMS error of the fast kernel relative to the default one.

A different summation order gives 1 to 2, rounding to bf16 about 1000.
"""


def is_fast_matmul_exact() -> bool:
    """Check that the float32 matmul of oneDNN is as exact on this CPU as the default one.

    "medium" precision selects it. On most CPUs it computes in float32 and is up to 2.4 times
    faster; CPUs with bf16 matrix units round the inputs to bf16.
    """
    # Libraries use matrix units only above some size, so a small matmul would not detect them.
    return all(_is_exact(rows, inner) for rows, inner in ((96, 384), (512, 1024)))


@cache
def _is_exact(rows: int, inner: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator)
    b = torch.randn(inner, rows, generator=generator)
    # Measured rather than looked up: no API tells which kernel oneDNN selects.
    exact = a.double() @ b.double()
    with use_matmul_precision("highest"):
        usual = (a @ b - exact).square().mean().sqrt()
    with use_matmul_precision("medium"):
        fast = (a @ b - exact).square().mean().sqrt()
    return bool(fast <= _MAX_ERROR_RATIO * usual)


@contextmanager
def use_matmul_precision(precision: str) -> Iterator[None]:
    """Set torch's float32 matmul precision inside the context."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def has_cpu_kernels(compute: str) -> bool:
    """Return True if this CPU has matmul kernels for a compute dtype.

    Without them torch falls back to a plain loop of about 1 GFLOP/s.
    """
    if compute == "fp32":
        return True
    return bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if compute == "bf16"
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


@cache
def warn_if_slow_on_cpu(compute: str) -> None:
    """Log one warning if this CPU has no matmul kernels for the compute dtype."""
    if not has_cpu_kernels(compute):
        logger.warning(
            "precision.compute is %s, but this CPU has no %s instructions, so matrix products are "
            "10 to 50 times slower than in float32: set precision.compute=fp32, unless you want to "
            "test the rounding of %s.",
            compute,
            compute,
            compute,
        )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of "bf16", "fp16" or "fp32"."""
    return _DTYPES[name]


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside the context and restore its state afterwards.

    Models are initialized on the CPU, so only that generator is forked. `torch.manual_seed` would
    seed every GPU as well, and saving GPU states allocates memory on each GPU, including those used
    by other ranks.
    """
    with torch.random.fork_rng(devices=[]):
        restart_rng(seed)
        yield


def restart_rng(seed: int) -> None:
    """Reset the CPU generator to a seed's first number; use inside `fork_rng`."""
    torch.default_generator.manual_seed(seed)
