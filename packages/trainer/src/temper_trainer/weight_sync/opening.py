"""Which transport a configuration means."""

from collections.abc import Callable

from temper_trainer.config.run import TrainerConfig
from temper_trainer.rollout.channel import Backend
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.weight_sync.buckets import WeightBucket, export_buckets
from temper_trainer.weight_sync.collective import CollectiveTransport, has_cuda
from temper_trainer.weight_sync.shared_memory import AdapterTransport, SharedMemoryTransport
from temper_trainer.weight_sync.transport import RunsOnRanks, StreamTransport, Transport


def open_transport(config: TrainerConfig, *, actor: RunsOnRanks, sampler: Sampler) -> Transport:
    """The way that ``weight_sync`` names, from an actor whose model is built to an open sampler."""
    sync = config.weight_sync
    if not isinstance(sampler, VllmSampler):
        return StreamTransport(export=_exporter(actor, bucket_bytes=sync.bucket_bytes), sampler=sampler)
    if sync.content == "adapter":
        return AdapterTransport(actor=actor, sampler=sampler)
    if sync.transport in ("auto", "shared_memory"):
        return SharedMemoryTransport(actor=actor, sampler=sampler, bucket_bytes=sync.bucket_bytes, with_digest=sync.checksum)
    on_gpu = config.actor.engine.device != "cpu" and actor.run(has_cuda, [()] * actor.num_workers)[0]
    backend: Backend = "cuda_ipc" if sync.transport == "cuda_ipc" else "nccl" if on_gpu else "gloo"
    return CollectiveTransport(
        actor=actor,
        sampler=sampler,
        backend=backend,
        workers_per_replica=config.rollout.vllm.tensor_parallel_size,
        bucket_bytes=sync.bucket_bytes,
        with_digest=sync.checksum,
    )


def _exporter(actor: RunsOnRanks, *, bucket_bytes: int) -> Callable[[], list[WeightBucket]]:
    return lambda: actor.run(export_buckets, [(bucket_bytes,)] * actor.num_workers)[0]
