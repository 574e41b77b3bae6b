"""An actor that reserves GPUs for a server. It imports little, to cost no time and memory."""

from typing import TYPE_CHECKING, Protocol

import ray

if TYPE_CHECKING:
    from temper_trainer.runtime.ray.ray_calls import RemoteMethod


class HolderHandle(Protocol):
    """Methods of a Ray handle to a DeviceHolder."""

    list_gpus: "RemoteMethod"


class DeviceHolder:
    """Reserves a server's share of the GPUs of one bundle, which the server's own actor cannot."""

    def list_gpus(self) -> list[str]:
        """Return the reserved GPUs, as in CUDA_VISIBLE_DEVICES on this node."""
        gpus: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return gpus
