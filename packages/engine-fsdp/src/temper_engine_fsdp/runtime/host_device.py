"""What keeps the host ahead of a CUDA device: copies that nobody waits for, and no garbage collection in the middle of a pass.

A host that waits once in a micro-batch starts the next one with an empty queue; on several ranks the slowest one is waited for by all.
"""

import gc
import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; to CUDA through pinned memory, since from any other the host waits for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncScalar:
    """A number that a device is still computing, on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._on_host = number
        self._copy_done: torch.cuda.Event | None = None
        if number.is_cuda:
            self._on_host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(
                number, non_blocking=True
            )
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def result(self) -> float:
        """Waits for it, and for nothing that was launched after it."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        return float(self._on_host)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Python's cyclic garbage collector waits until after this, where it was on; what is no longer referred to is freed as always."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


logger = logging.getLogger(__name__)

_SYS = Path("/sys")


def bind_to_near_cores(device: torch.device) -> None:
    """Bind this process to the cores of the memory node of a CUDA device; says in the log why where that changes nothing."""
    if sys.platform != "linux" or device.type != "cuda":
        logger.info(
            "numa_affinity changes nothing for %s on %s: it is for CUDA on Linux",
            device,
            sys.platform,
        )
        return
    properties: Any = torch.cuda.get_device_properties(
        device
    )  # whose types lack where the device is plugged in
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    near = find_near_cores(address, allowed=os.sched_getaffinity(0))
    if not near:
        logger.info(
            "numa_affinity changes nothing: this machine tells no cores near %s that this process "
            "may use",
            address,
        )
        return
    os.sched_setaffinity(0, near)
    logger.info("bound to the %d cores near %s", len(near), address)


def find_near_cores(address: str, *, allowed: Collection[int], root: Path = _SYS) -> set[int]:
    """Those of the allowed cores that share a memory node with a PCI device; none where Linux does not tell.

    Args:
        address: such as 0000:1b:00.0.
        allowed: cores to choose from.
        root: of sysfs.
    """
    node_file = root / "bus/pci/devices" / address / "numa_node"
    if not node_file.is_file() or (node := int(node_file.read_text())) < 0:
        return set()
    core_list = root / f"devices/system/node/node{node}/cpulist"
    return parse_core_list(core_list.read_text()) & set(allowed) if core_list.is_file() else set()


def parse_core_list(text: str) -> set[int]:
    """The kernel's lists: "0-3,8" is 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
