"""What keeps the host ahead of a CUDA device: copies that nobody waits for, and no garbage collection in the middle of a pass.

A host that waits once in a micro-batch starts the next one with an empty queue; on several ranks the slowest one is waited for by all.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; to CUDA through pinned memory, since from any other the host waits for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class LateNumber:
    """A number that a device is still computing, on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._on_host = number
        self._arrival: torch.cuda.Event | None = None
        if number.is_cuda:
            self._on_host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def result(self) -> float:
        """Waits for it, and for nothing that was launched after it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._on_host)


@contextmanager
def without_collections() -> Iterator[None]:
    """Python's cyclic garbage collector waits until after this, where it was on; what is no longer referred to is freed as always."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
