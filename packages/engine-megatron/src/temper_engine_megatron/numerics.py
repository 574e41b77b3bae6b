"""Determinism, set for the whole process only while the engine computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels whose result does not depend on timing inside, the caller's setting again outside."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
