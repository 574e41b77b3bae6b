"""Build the transport that a configuration asks for; `auto` chooses one by where processes run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import WeightSyncConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.sampler import ReplicaError, Sampler
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import Backend, DeviceLocation
from temper_trainer.weight_sync.buckets import export_buckets
from temper_trainer.weight_sync.channel_sender import locate_sender
from temper_trainer.weight_sync.collective_transport import CollectiveTransport
from temper_trainer.weight_sync.shared_memory_transport import (
    AdapterTransport,
    SharedMemoryDeltaTransport,
    SharedMemoryTransport,
)
from temper_trainer.weight_sync.stream_transport import (
    DeltaReceiver,
    FetchTransport,
    InProcessTransport,
    StreamDeltaTransport,
    StreamTransport,
    WeightFetcher,
)
from temper_trainer.weight_sync.transport import RankGroup, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """A transport to vLLM servers and the reason for it."""

    transport: Literal["shared_memory", "cuda_ipc", "collective"]
    """A value of `weight_sync.transport`."""
    reason: str
    """Completes a sentence after "because"."""


def build_transport(config: TrainerConfig, *, actor: RankGroup, sampler: Sampler) -> Transport:
    """Build the transport that sends weights from the actor to the sampler.

    The actor's model must be built, and the sampler must be running.
    """
    sync = config.weight_sync
    if not isinstance(sampler, VllmSampler):
        return _build_transformers_transport(
            sync, is_inline=config.runtime.kind == "inline", actor=actor, sampler=sampler
        )
    if sync.content == "adapter":
        return AdapterTransport(actor=actor, sampler=sampler)
    transport, may_use_gpu = sync.transport, config.actor.engine.device != "cpu"
    # Ask the running processes for their hosts and GPUs, because the configuration does not say
    # where they were placed.
    if transport == "auto":
        choice = choose_transport(
            _locate_senders(actor, may_use_gpu=may_use_gpu), _locate_receivers(sampler)
        )
        logger.info(
            "placement: weights get to the servers by %s, because %s",
            choice.transport,
            choice.reason,
        )
        transport = choice.transport
    max_changed_fraction = sync.max_changed_fraction if sync.content == "delta" else None
    if transport == "shared_memory" and max_changed_fraction is not None:
        return SharedMemoryDeltaTransport(
            actor=actor,
            sampler=sampler,
            bucket_bytes=sync.bucket_bytes,
            with_digest=sync.checksum,
            max_changed_fraction=max_changed_fraction,
        )
    if transport == "shared_memory":
        return SharedMemoryTransport(
            actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum
        )
    senders = _locate_senders(actor, may_use_gpu=may_use_gpu)
    is_on_gpu = senders[0].gpu is not None
    backend: Backend = "cuda_ipc" if transport == "cuda_ipc" else "nccl" if is_on_gpu else "gloo"
    return CollectiveTransport(
        actor=actor,
        sampler=sampler,
        backend=backend,
        workers_per_replica=config.rollout.vllm.tensor_parallel_size,
        bucket_bytes=sync.bucket_bytes,
        with_digest=sync.checksum,
        load_timeout_s=config.rollout.vllm.load_timeout_s,
        # A restarted server gets the weights again from the actor. That works only if the actor is
        # idle while servers sample; in the other loops it trains at the same time.
        can_resend=config.loop == "sync",
        senders=senders if transport == "cuda_ipc" else None,
        max_changed_fraction=max_changed_fraction,
        bind_address=config.runtime.bind_address,
    )


def choose_transport(
    senders: Sequence[DeviceLocation], receivers: Sequence[DeviceLocation]
) -> TransportChoice:
    """Choose the fastest transport that reaches all receivers.

    CUDA IPC and NCCL move tens to hundreds of GB/s and keep no copy. Shared memory goes through the
    host, and a restarted server finds the last weights there.

    Args:
        senders: Each actor rank's location.
        receivers: Location of every worker of every server.

    Raises:
        ConfigError: If no transport reaches all servers: some are on the actor's GPUs and others on
            another host, or a CPU and a GPU are on different hosts.
    """
    sender = senders[0]
    is_one_host = all(receiver.host == sender.host for receiver in receivers)
    gpus = [receiver.gpu for receiver in receivers]
    all_on_gpus = sender.gpu is not None and None not in gpus
    if all_on_gpus and set(receivers) <= set(senders):
        return TransportChoice(
            transport="cuda_ipc", reason="the servers are on the GPUs of the actor's ranks"
        )
    # NCCL refuses two ranks on one GPU.
    if all_on_gpus and sender.gpu not in gpus and len(set(gpus)) == len(gpus):
        return TransportChoice(
            transport="collective", reason="the servers have GPUs of their own (NCCL)"
        )
    if is_one_host:
        reason = (
            "they are on the CPUs of one host"
            if sender.gpu is None and not any(gpus)
            else _explain_no_gpu_transport(sender, receivers)
        )
        return TransportChoice(transport="shared_memory", reason=reason)
    if sender.gpu is None and not any(gpus):
        return TransportChoice(
            transport="collective", reason="they are on the CPUs of several hosts (gloo)"
        )
    raise ConfigError(
        "weight_sync.transport is auto, but no transport reaches all servers: "
        f"{_explain_no_gpu_transport(sender, receivers)}, and not all of them are on the actor's "
        "host. Give the servers GPUs of their own (rollout.pool), or place them on the actor's "
        "host."
    )


def _explain_no_gpu_transport(sender: DeviceLocation, receivers: Sequence[DeviceLocation]) -> str:
    gpus = [receiver.gpu for receiver in receivers]
    if sender.gpu is None or None in gpus:
        return "only one side has a GPU"
    # Containers on one machine have host names of their own.
    hosts = [each.host for each in receivers if each.gpu == sender.gpu and each.host != sender.host]
    if hosts:
        return (
            f"a server uses the actor's GPU {sender.gpu} in another container (the actor's host "
            f"name is {sender.host}, the server's is {hosts[0]})"
        )
    if sender.gpu in gpus:
        return "some workers of servers are on GPUs of the actor and some are not"
    return "several workers of servers share a GPU"


def _build_transformers_transport(
    sync: WeightSyncConfig, *, is_inline: bool, actor: RankGroup, sampler: Sampler
) -> Transport:
    full_transport: Transport
    if isinstance(sampler, WeightFetcher):
        full_transport = FetchTransport(
            actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum
        )
    elif is_inline:
        full_transport = InProcessTransport(actor=actor, sampler=sampler)
    else:
        full_transport = StreamTransport(
            export=lambda: actor.run_on_all(export_buckets, sync.bucket_bytes)[0], sampler=sampler
        )
    if sync.content != "delta":
        return full_transport
    if not isinstance(sampler, DeltaReceiver):
        raise ConfigError(
            f"weight_sync.content is delta, but {type(sampler).__name__} cannot load a delta: set "
            "weight_sync.content=full."
        )
    return StreamDeltaTransport(
        full_transport,
        actor=actor,
        sampler=sampler,
        bucket_bytes=sync.bucket_bytes,
        max_changed_fraction=sync.max_changed_fraction,
    )


def _locate_senders(actor: RankGroup, *, may_use_gpu: bool) -> list[DeviceLocation]:
    return actor.run_on_all(locate_sender, may_use_gpu)


def _locate_receivers(sampler: VllmSampler) -> list[DeviceLocation]:
    """Return the location of every worker; a server that has died is restarted first."""
    # The call has one entry for each server, so no server may join or leave before it.
    with sampler.hold_members():
        answers = sampler.call_each("device_locations", [()] * len(sampler.replicas))
    # None is the answer of a server that has left.
    workers_by_server = cast("list[list[tuple[str, str | None]] | None]", answers)
    locations = [
        DeviceLocation(host=host, gpu=gpu)
        for workers in workers_by_server
        for host, gpu in workers or ()
    ]
    if not locations:
        raise ReplicaError(
            "all servers have left before the first weight sync: see the log for the reasons, and "
            "start the run again."
        )
    return locations
