"""Where weights lie: the host and the GPU of one process, by names that are the same for every process that sees them."""

import socket
from dataclasses import dataclass
from pathlib import Path

import torch

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLocation:
    """Of one process that holds weights."""

    host: str
    """Name and boot of the machine, or of the container, whose shared memory is its own."""
    gpu: str | None = None
    """UUID of the GPU, whatever its number is here; None is the CPU."""


def locate_device(device: torch.device) -> DeviceLocation:
    """Of this process, whose weights are on a device."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return DeviceLocation(host=f"{socket.gethostname()} {boot}", gpu=gpu)
