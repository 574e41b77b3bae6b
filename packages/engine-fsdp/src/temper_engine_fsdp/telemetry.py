"""How much memory this rank holds, as metrics."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from temper_engine_api.metrics import Metric

_GIB = 2**30
_STATM = Path("/proc/self/statm")


class WhenRead(Mapping[str, Metric]):
    """Metrics that are asked for when somebody reads them."""

    def __init__(self, ask: Callable[[], Mapping[str, Metric]]) -> None:
        self._ask = cache(ask)

    def __getitem__(self, name: str) -> Metric:
        return self._ask()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ask())

    def __len__(self) -> int:
        return len(self._ask())


def memory_metrics(device: torch.device) -> Mapping[str, Metric]:
    """Largest of all ranks: GiB of this process in host memory where Linux tells, and of tensors and of the allocator on CUDA."""
    found: dict[str, float] = {}
    if _STATM.is_file():
        found["memory/host_gib"] = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    if device.type == "cuda":
        found["memory/allocated_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        found["memory/reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    return {name: Metric(value=value, reduction="max") for name, value in found.items()}
