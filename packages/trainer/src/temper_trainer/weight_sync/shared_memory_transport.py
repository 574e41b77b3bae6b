"""Transports through files in shared memory, to vLLM servers on the actor's host.

The actor writes each bucket to a file once and every server maps it. The files of the last publish
are kept until the next one is loaded everywhere, so that a restarted server can load them too.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.errors import TemperError, WeightError
from temper_engine_api.process_folders import lock_folder, make_folder_path
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    open_mapped_file,
    split_into_buckets,
    unpack_tensors,
    write_weight_file,
)
from temper_trainer.rollout.sampler import Replica
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_delta import (
    FULL_TENSOR,
    DeltaManifest,
    apply_delta,
    compute_delta,
    count_sent_elements,
    open_delta_file,
    write_delta_file,
)
from temper_trainer.temporary_folders import find_shared_memory_root
from temper_trainer.weight_sync.buckets import WeightExporter, participate_in_export
from temper_trainer.weight_sync.sender_state import iterate_checked_buckets
from temper_trainer.weight_sync.transport import RankGroup, SentWeights

logger = logging.getLogger(__name__)


class AdapterExporter(Protocol):
    """A training worker with a LoRA adapter."""

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the role."""
        ...

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return PEFT's configuration and tensors; collective."""
        ...


class SharedMemoryTransport:
    """Sends all weights at every publish."""

    def __init__(
        self, *, actor: RankGroup, sampler: VllmSampler, bucket_bytes: int, with_digest: bool
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._folder = choose_weight_folder(actor)
        self._previous: Path | None = None

    def send(self, version: int) -> SentWeights:
        """Write every bucket, load it in every server, and remove the previous files."""
        folder = self._folder / f"version-{version}"
        buckets = self._actor.run_on_all(
            write_weight_files, str(folder), self._bucket_bytes, self._with_digest
        )[0]

        def start_load(replica: Replica) -> "Future[object]":
            return replica.call("load_files", buckets, version)

        self._sampler.load(start_load, version=version)
        # Delete the previous files only after every server has loaded the new ones: if a server
        # refuses the new files, a restarted server loads the previous ones.
        if self._previous is not None:
            self._actor.run_on_all(remove_folder, str(self._previous))
        self._previous = folder
        return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in buckets), fraction=1.0)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)


class SharedMemoryDeltaTransport:
    """Writes all weights once and deltas afterwards; servers always read both.

    A server therefore needs no earlier weights: a restarted one loads the same files. When the next
    delta is computed, the previous one is first applied to the files of the full weights.
    """

    def __init__(
        self,
        *,
        actor: RankGroup,
        sampler: VllmSampler,
        bucket_bytes: int,
        with_digest: bool,
        max_changed_fraction: float,
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._max_changed_fraction = max_changed_fraction
        self._folder = choose_weight_folder(actor)
        self._base: tuple[PackedBucket, ...] = ()
        self._loaded = DeltaManifest(version=0, base_version=0, deltas=())
        """The delta that every server has loaded on top of the base files."""

    def send(self, version: int) -> SentWeights:
        """Write a delta, or all weights the first time, and load both in every server."""
        if not self._base:
            return self._send_full(version)
        folder = self._delta_folder(version)
        manifest = self._actor.run_on_all(
            write_delta,
            self._base,
            self._loaded,
            version,
            str(folder),
            self._bucket_bytes,
            self._with_digest,
            self._max_changed_fraction,
        )[0]

        def start_load(replica: Replica) -> "Future[object]":
            return replica.call("load_delta", self._base, manifest)

        self._sampler.load(start_load, version=version)
        self._actor.run_on_all(remove_folder, str(self._delta_folder(self._loaded.version)))
        self._loaded = manifest
        return self._measure(manifest)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)

    def _send_full(self, version: int) -> SentWeights:
        buckets = self._actor.run_on_all(
            write_weight_files, str(self._folder / "full"), self._bucket_bytes, self._with_digest
        )[0]

        def start_load(replica: Replica) -> "Future[object]":
            return replica.call("load_files", buckets, version)

        self._sampler.load(start_load, version=version)
        self._base = tuple(buckets)
        self._loaded = DeltaManifest(version=version, base_version=version, deltas=())
        return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in buckets), fraction=1.0)

    def _measure(self, manifest: DeltaManifest) -> SentWeights:
        pairs = list(zip(self._base, manifest.deltas, strict=True))
        num_elements = sum(
            count_sent_elements(base.entries, [FULL_TENSOR] * len(base.entries))
            for base, _ in pairs
        )
        num_sent = sum(count_sent_elements(base.entries, delta.counts) for base, delta in pairs)
        return SentWeights(
            num_bytes=sum(delta.num_bytes for _, delta in pairs), fraction=num_sent / num_elements
        )

    def _delta_folder(self, version: int) -> Path:
        return self._folder / f"delta-{version}"


class AdapterTransport:
    """Sends only the LoRA adapter, as a PEFT directory in shared memory."""

    def __init__(self, *, actor: RankGroup, sampler: VllmSampler) -> None:
        self._actor = actor
        self._sampler = sampler
        self._folder = choose_weight_folder(actor)
        self._previous: Path | None = None

    def send(self, version: int) -> SentWeights:
        """Write the adapter, load it in every server, and remove the previous one."""
        folder = self._folder / f"version-{version}"
        num_bytes = self._actor.run_on_all(write_adapter, str(folder))[0]
        if not num_bytes:
            raise WeightError(
                "the actor's adapter has no tensors: check actor.engine.lora.target_modules."
            )

        def start_load(replica: Replica) -> "Future[object]":
            return replica.call("load_adapter", str(folder), version)

        self._sampler.load(start_load, version=version)
        if self._previous is not None:
            self._actor.run_on_all(remove_folder, str(self._previous))
        self._previous = folder
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)


def write_weight_files(
    worker: WeightExporter, folder: str, bucket_bytes: int, with_digest: bool
) -> list[PackedBucket]:
    """Write all weights on rank 0 and return their buckets; runs on every actor rank.

    Raises:
        WeightError: If the weights do not fit into `folder`, which is in shared memory.
    """
    if not worker.is_first:
        participate_in_export(worker)
        return []
    files = []
    with worker.export_weights() as stream, _finish_on_error(stream, folder=Path(folder)):
        recreate_folder(Path(folder))
        for index, bucket in enumerate(split_into_buckets(stream, bucket_bytes=bucket_bytes)):
            path = Path(folder) / f"{index:05d}"
            files.append(write_weight_file(bucket, path, with_digest=with_digest))
    return files


def write_delta(
    worker: WeightExporter,
    base: Sequence[PackedBucket],
    loaded: DeltaManifest,
    version: int,
    folder: str,
    bucket_bytes: int,
    with_digest: bool,
    max_changed_fraction: float,
) -> DeltaManifest:
    """Update the base files and write the delta to them on rank 0; runs on every actor rank.

    Args:
        worker: A worker of the actor.
        base: Files of the full weights.
        loaded: The delta that every server has loaded. It is applied to the base files.
        version: Version of the current weights.
        folder: Folder for the new delta.
        bucket_bytes: The same as for the base files.
        with_digest: Compute checksums.
        max_changed_fraction: See `compute_delta`.

    Raises:
        WeightError: If the delta does not fit into `folder`, which is in shared memory, or the
            weights have another layout.
    """
    manifest = DeltaManifest(version=version, base_version=loaded.version, deltas=())
    if not worker.is_first:
        participate_in_export(worker)
        return manifest
    with worker.export_weights() as stream, _finish_on_error(stream, folder=Path(folder)):
        bases = [_update_base_file(bucket, loaded, index) for index, bucket in enumerate(base)]
        recreate_folder(Path(folder))
        deltas = []
        matched = iterate_checked_buckets(
            stream, [bucket.entries for bucket in base], bucket_bytes=bucket_bytes
        )
        for index, (weights, entries) in enumerate(matched):
            delta = compute_delta(weights, bases[index], max_changed_fraction=max_changed_fraction)
            path = Path(folder) / f"{index:05d}"
            deltas.append(write_delta_file(weights, delta, entries, path, with_digest=with_digest))
    return replace(manifest, deltas=tuple(deltas))


@contextmanager
def _finish_on_error(stream: Iterator[NamedWeight], *, folder: Path) -> Iterator[None]:
    """On an error in the body, read the stream to its end, remove the folder, and raise."""
    try:
        yield
    except (WeightError, OSError) as error:
        # Other ranks take part in gathering the remaining tensors; they would wait forever.
        for _ in stream:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise WeightError(
                f"weights cannot be written to {folder}: {error.strerror}. Check the file system "
                f"(df {folder.parent})."
            ) from error
        raise


def _update_base_file(bucket: PackedBucket, loaded: DeltaManifest, index: int) -> list[Tensor]:
    """Apply the loaded delta to a base file and return its tensors, mapped from the file.

    Applying it twice does no harm, so an attempt that failed halfway can be repeated.
    """
    assert bucket.path is not None
    data = open_mapped_file(Path(bucket.path), num_bytes=bucket.num_bytes, is_shared=True)
    tensors = [weight.tensor for weight in unpack_tensors(data, bucket)]
    if loaded.deltas:
        delta = loaded.deltas[index]
        apply_delta(tensors, open_delta_file(delta), bucket.entries, delta.counts)
    return tensors


def write_adapter(worker: AdapterExporter, folder: str) -> int:
    """Write PEFT's two files on rank 0 and return the tensors' size in bytes."""
    config, tensors = worker.export_adapter()
    if worker.is_first:
        recreate_folder(Path(folder))
        (Path(folder) / "adapter_config.json").write_text(json.dumps(dict(config)))
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def remove_folder(worker: WeightExporter, folder: str) -> None:
    """Remove a folder of this run on rank 0."""
    if worker.is_first:
        shutil.rmtree(folder, ignore_errors=True)


def remove_weight_folder(folder: Path, *, actor: RankGroup) -> None:
    """Remove a folder from the driver and from the actor."""
    # Remove it twice, because the actor may be on another host, and it may be dead.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        actor.run_on_all(remove_folder, str(folder))
    except TemperError as error:
        logger.warning("the actor cannot remove the weights in %s: %s", folder, error)


def recreate_folder(folder: Path) -> None:
    """Create an empty folder; remove what a failed attempt at the same version left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    lock_folder(folder.parent)


def choose_weight_folder(actor: RankGroup) -> Path:
    """Return a path in shared memory that is owned by the process of the actor's rank 0.

    Folders of earlier runs whose process is dead are removed.
    """
    return Path(actor.run_on_all(_choose_folder_path)[0])


def _choose_folder_path(worker: WeightExporter) -> str:
    # Rank 0 writes the files, so its process must own the folder.
    if not worker.is_first:
        return ""
    return str(make_folder_path("weights", root=find_shared_memory_root()))
