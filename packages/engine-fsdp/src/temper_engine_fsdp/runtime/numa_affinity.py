"""Pin a process to the CPU cores near its device (`numa_affinity`)."""

import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SYS = Path("/sys")


def bind_to_near_cores(device: torch.device) -> None:
    """Pin this process to the CPU cores on the NUMA node of a CUDA device.

    Pinned memory is then allocated on the same node as the GPU. If the node is unknown, log the
    reason and change nothing.
    """
    if sys.platform != "linux" or device.type != "cuda":
        logger.info(
            "numa_affinity has no effect for %s on %s: it needs a CUDA device and Linux",
            device,
            sys.platform,
        )
        return
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the PCI fields
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
    address = f"{bus}:{properties.pci_device_id:02x}.0"
    near = find_near_cores(address, allowed=os.sched_getaffinity(0))
    if not near:
        logger.info(
            "numa_affinity has no effect: found no cores near %s that this process may use",
            address,
        )
        return
    os.sched_setaffinity(0, near)
    logger.info("pinned this process to the %d cores near %s", len(near), address)


def find_near_cores(address: str, *, allowed: Collection[int], root: Path = _SYS) -> set[int]:
    """Return the allowed cores on the NUMA node of a PCI device; empty if the node is unknown.

    Args:
        address: PCI address, such as `0000:1b:00.0`.
        allowed: Core ids to choose from.
        root: Mount point of sysfs.
    """
    node_file = root / "bus/pci/devices" / address / "numa_node"
    if not node_file.is_file() or (node := int(node_file.read_text())) < 0:
        return set()
    core_list = root / f"devices/system/node/node{node}/cpulist"
    return parse_core_list(core_list.read_text()) & set(allowed) if core_list.is_file() else set()


def parse_core_list(text: str) -> set[int]:
    """Parse a core list of the Linux kernel: "0-3,8" is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
