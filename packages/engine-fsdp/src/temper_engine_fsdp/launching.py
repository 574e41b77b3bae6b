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
