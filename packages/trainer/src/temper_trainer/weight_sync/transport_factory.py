"""Which transport a configuration means."""

import logging
from collections.abc import Callable
from typing import cast

from temper_engine_api.errors import ConfigError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.device_location import DeviceLocation
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import Backend
from temper_trainer.weight_sync.buckets import WeightBucket, export_buckets
from temper_trainer.weight_sync.choosing import choose_transport
from temper_trainer.weight_sync.collective_transport import CollectiveTransport, locate_sender
from temper_trainer.weight_sync.shared_changes import SharedMemoryDeltaTransport
from temper_trainer.weight_sync.shared_memory_transport import (
    AdapterTransport,
    SharedMemoryTransport,
)
from temper_trainer.weight_sync.stream_transport import DeltaReceiver, StreamDeltaTransport
from temper_trainer.weight_sync.transport import (
    FetchTransport,
    InProcessTransport,
    RankGroup,
    StreamTransport,
    Transport,
    WeightFetcher,
)

logger = logging.getLogger(__name__)


def build_transport(config: TrainerConfig, *, actor: RankGroup, sampler: Sampler) -> Transport:
    """The way that ``weight_sync`` names, from an actor whose model is built to an open sampler."""
    sync = config.weight_sync
    if not isinstance(sampler, VllmSampler):
        return _build_in_process_transport(config, actor=actor, sampler=sampler)
    if sync.content == "adapter":
        return AdapterTransport(actor=actor, sampler=sampler)
    transport = sync.transport
    if transport == "auto":
        choice = choose_transport(_locate_sender(config, actor), _locate_receivers(sampler))
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
    on_gpu = _locate_sender(config, actor).gpu is not None
    backend: Backend = "cuda_ipc" if transport == "cuda_ipc" else "nccl" if on_gpu else "gloo"
    return CollectiveTransport(
        actor=actor,
        sampler=sampler,
        backend=backend,
        workers_per_replica=config.rollout.vllm.tensor_parallel_size,
        bucket_bytes=sync.bucket_bytes,
        with_digest=sync.checksum,
        can_resend=config.loop == "sync",
        max_changed_fraction=max_changed_fraction,
        bind_address=config.runtime.bind_address,
    )


def _locate_sender(config: TrainerConfig, actor: RankGroup) -> DeviceLocation:
    may_have_gpu = config.actor.engine.device != "cpu"
    return actor.run(locate_sender, [(may_have_gpu,)] * actor.num_workers)[0]


def _build_in_process_transport(
    config: TrainerConfig, *, actor: RankGroup, sampler: Sampler
) -> Transport:
    sync = config.weight_sync
    whole: Transport
    if isinstance(sampler, WeightFetcher):
        whole = FetchTransport(
            actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum
        )
    elif config.runtime.kind == "inline":
        whole = InProcessTransport(actor=actor, sampler=sampler)
    else:
        whole = StreamTransport(
            export=_make_exporter(actor, bucket_bytes=sync.bucket_bytes), sampler=sampler
        )
    if sync.content != "delta":
        return whole
    if not isinstance(sampler, DeltaReceiver):
        raise ConfigError(
            f"weight_sync.content is delta, but {type(sampler).__name__} takes whole sets only: set it to full."
        )
    return StreamDeltaTransport(
        whole,
        actor=actor,
        sampler=sampler,
        bucket_bytes=sync.bucket_bytes,
        max_changed_fraction=sync.max_changed_fraction,
    )


def _locate_receivers(sampler: VllmSampler) -> list[DeviceLocation]:
    """Return the place of every worker; a server that has died since it was ready is started again."""
    answers = sampler.call_each("places", [()] * len(sampler.replicas))
    workers = cast("list[list[tuple[str, str | None]]]", answers)
    return [DeviceLocation(host=host, gpu=gpu) for replica in workers for host, gpu in replica]


def _make_exporter(actor: RankGroup, *, bucket_bytes: int) -> Callable[[], list[WeightBucket]]:
    return lambda: actor.run(export_buckets, [(bucket_bytes,)] * actor.num_workers)[0]
