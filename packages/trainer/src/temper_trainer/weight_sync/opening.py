"""Which transport a configuration means."""

import logging
from collections.abc import Callable
from typing import cast

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import TrainerConfig
from temper_trainer.rollout.channel import Backend
from temper_trainer.rollout.place import Place
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.weight_sync.buckets import WeightBucket, export_buckets
from temper_trainer.weight_sync.choosing import choose_transport
from temper_trainer.weight_sync.collective import CollectiveTransport, sender_place
from temper_trainer.weight_sync.shared_changes import SharedChangeTransport
from temper_trainer.weight_sync.shared_memory import AdapterTransport, SharedMemoryTransport
from temper_trainer.weight_sync.stream_changes import StreamChangeTransport, TakesChanges
from temper_trainer.weight_sync.transport import (
    FetchesWeights,
    FetchTransport,
    RunsOnRanks,
    StreamTransport,
    Transport,
)

logger = logging.getLogger(__name__)


def open_transport(config: TrainerConfig, *, actor: RunsOnRanks, sampler: Sampler) -> Transport:
    """The way that ``weight_sync`` names, from an actor whose model is built to an open sampler."""
    sync = config.weight_sync
    if not isinstance(sampler, VllmSampler):
        return _to_transformers(config, actor=actor, sampler=sampler)
    if sync.content == "adapter":
        return AdapterTransport(actor=actor, sampler=sampler)
    transport = sync.transport
    if transport == "auto":
        choice = choose_transport(_sender(config, actor), _receivers(sampler))
        logger.info(
            "placement: weights get to the servers by %s, because %s",
            choice.transport,
            choice.reason,
        )
        transport = choice.transport
    max_share = sync.max_changed_share if sync.content == "delta" else None
    if transport == "shared_memory" and max_share is not None:
        return SharedChangeTransport(
            actor=actor,
            sampler=sampler,
            bucket_bytes=sync.bucket_bytes,
            with_digest=sync.checksum,
            max_share=max_share,
        )
    if transport == "shared_memory":
        return SharedMemoryTransport(
            actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum
        )
    on_gpu = _sender(config, actor).gpu is not None
    backend: Backend = "cuda_ipc" if transport == "cuda_ipc" else "nccl" if on_gpu else "gloo"
    return CollectiveTransport(
        actor=actor,
        sampler=sampler,
        backend=backend,
        workers_per_replica=config.rollout.vllm.tensor_parallel_size,
        bucket_bytes=sync.bucket_bytes,
        with_digest=sync.checksum,
        may_send_again=config.loop == "sync",
        max_share=max_share,
        bind_address=config.runtime.bind_address,
    )


def _sender(config: TrainerConfig, actor: RunsOnRanks) -> Place:
    may_have_gpu = config.actor.engine.device != "cpu"
    return actor.run(sender_place, [(may_have_gpu,)] * actor.num_workers)[0]


def _to_transformers(config: TrainerConfig, *, actor: RunsOnRanks, sampler: Sampler) -> Transport:
    sync = config.weight_sync
    whole: Transport = (
        FetchTransport(
            actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum
        )
        if isinstance(sampler, FetchesWeights)
        else StreamTransport(
            export=_exporter(actor, bucket_bytes=sync.bucket_bytes), sampler=sampler
        )
    )
    if sync.content != "delta":
        return whole
    if not isinstance(sampler, TakesChanges):
        raise ConfigError(
            f"weight_sync.content is delta, but {type(sampler).__name__} takes whole sets only: set it to full."
        )
    return StreamChangeTransport(
        whole,
        actor=actor,
        sampler=sampler,
        bucket_bytes=sync.bucket_bytes,
        max_share=sync.max_changed_share,
    )


def _receivers(sampler: VllmSampler) -> list[Place]:
    """Return the place of every worker; a server that has died since it was ready is started again."""
    answers = sampler.call_each("places", [()] * len(sampler.replicas))
    workers = cast("list[list[tuple[str, str | None]]]", answers)
    return [Place(host=host, gpu=gpu) for replica in workers for host, gpu in replica]


def _exporter(actor: RunsOnRanks, *, bucket_bytes: int) -> Callable[[], list[WeightBucket]]:
    return lambda: actor.run(export_buckets, [(bucket_bytes,)] * actor.num_workers)[0]
