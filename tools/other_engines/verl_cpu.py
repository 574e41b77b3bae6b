"""The CPU as a platform of verl, for its adapter in the conformance kit and for bench_update.py."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch


def register_cpu_platform() -> None:
    """Register the CPU as a platform of verl, under the name `cpu`, and select it."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    if PlatformRegistry.get("cpu") is not None:
        return
    answers: dict[str, object] = {
        # True would make verl restore the random state of an accelerator.
        "is_available": False,
        "current_device": torch.device("cpu"),
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_allocator_settings": None,
        "empty_cache": None,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "nvtx_range": contextlib.nullcontext(),
        "profiler_start": None,
        "profiler_stop": None,
        "ray_resource_name": "CPU",
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
        "cudart": None,
    }
    methods: dict[str, object] = {name: _return(answer) for name, answer in answers.items()}
    names = {"device_name": "cpu", "vendor_name": "cpu", "device_module": torch.cpu}
    PlatformRegistry.register(platform="cpu")(type("CPU", (PlatformBase,), methods | names))


def _return(answer: object) -> Any:
    def method(self: object, *args: object, **kwargs: object) -> object:
        return answer

    return method
