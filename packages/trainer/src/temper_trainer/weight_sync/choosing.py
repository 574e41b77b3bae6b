"""Which transport takes weights from the actor to vLLM's servers, by where they are: a pure function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.rollout.device_location import DeviceLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """A transport, and why it."""

    transport: Literal["shared_memory", "cuda_ipc", "collective"]
    """As in weight_sync.transport."""
    reason: str
    """Completes ``because ...``."""


def choose_transport(
    sender: DeviceLocation, receivers: Sequence[DeviceLocation]
) -> TransportChoice:
    """The fastest way that works.

    CUDA IPC and NCCL move weights at tens to hundreds of GB/s and leave no copy behind; shared memory goes through the host, and a server
    that is started again finds the last set there.

    Args:
        sender: rank 0 of the actor.
        receivers: every worker of every server.

    Raises:
        ConfigError: some servers share the actor's GPU while others are on another host; or a CPU and a GPU are on different hosts.
    """
    is_one_host = all(receiver.host == sender.host for receiver in receivers)
    gpus = [receiver.gpu for receiver in receivers]
    on_gpus = sender.gpu is not None and None not in gpus
    if on_gpus and all(gpu == sender.gpu for gpu in gpus):
        return TransportChoice(
            transport="cuda_ipc", reason="the servers are on the GPU of the actor's rank 0"
        )
    if on_gpus and sender.gpu not in gpus and len(set(gpus)) == len(gpus):
        return TransportChoice(
            transport="collective", reason="the servers have GPUs of their own (NCCL)"
        )
    if is_one_host:
        why = (
            "they are on the CPUs of one host"
            if sender.gpu is None and not any(gpus)
            else _explain_no_gpu_path(sender, gpus)
        )
        return TransportChoice(transport="shared_memory", reason=why)
    if sender.gpu is None and not any(gpus):
        return TransportChoice(
            transport="collective", reason="they are on the CPUs of several hosts (gloo)"
        )
    raise ConfigError(
        f"weight_sync.transport is auto, but no way leads to all servers: {_explain_no_gpu_path(sender, gpus)}, and not all of them are on the "
        "actor's host. Give the servers GPUs of their own (rollout.pool), or place them on the actor's host."
    )


def _explain_no_gpu_path(sender: DeviceLocation, gpus: Sequence[str | None]) -> str:
    if sender.gpu is None or None in gpus:
        return "only one side has a GPU"
    if sender.gpu in gpus:
        return "some servers share the GPU of the actor's rank 0 and some do not"
    return "several workers of servers share a GPU"
