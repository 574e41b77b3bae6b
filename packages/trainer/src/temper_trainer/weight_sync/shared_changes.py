"""Changes through files in shared memory: the whole set lies there once, beside what changed in it since.

Servers put both together as they read, so that it does not matter what a server held before: one that is started again reads the same.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_trainer.rollout.packed_bucket import PackedBucket, open_mapped_file, unpack_tensors
from temper_trainer.rollout.replica import Replica
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
from temper_trainer.weight_sync.buckets import WeightExporter
from temper_trainer.weight_sync.sender_state import match_buckets
from temper_trainer.weight_sync.shared_memory_transport import (
    choose_weight_folder,
    recreate_folder,
    remove_folder,
    remove_weight_folder,
    write_weight_files,
)
from temper_trainer.weight_sync.transport import RankGroup, SentWeights


class SharedMemoryDeltaTransport:
    """See the module. The files of the whole set are brought up to date when the next changes are looked for."""

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
        self._max_share = max_changed_fraction
        self._folder = choose_weight_folder(actor)
        self._base: tuple[PackedBucket, ...] = ()
        self._loaded = DeltaManifest(version=0, base_version=0, parcels=())
        """What every server has taken on top of the whole set's files."""

    def send(self, version: int) -> SentWeights:
        """Write the whole set once, and from then on what changed; let every server read both."""
        if not self._base:
            return self._send_whole(version)
        folder = self._changes_folder(version)
        arguments = (
            self._base,
            self._loaded,
            version,
            str(folder),
            self._bucket_bytes,
            self._with_digest,
            self._max_share,
        )
        manifest = self._actor.run(write_delta, [arguments] * self._actor.num_workers)[0]

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_delta", self._base, manifest)

        self._sampler.load(load, version=version)
        self._remove(self._changes_folder(self._loaded.version))
        self._loaded = manifest
        return self._sent(manifest)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)

    def _send_whole(self, version: int) -> SentWeights:
        arguments = (str(self._folder / "whole"), self._bucket_bytes, self._with_digest)
        parcels = tuple(
            self._actor.run(write_weight_files, [arguments] * self._actor.num_workers)[0]
        )

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_files", parcels, version)

        self._sampler.load(load, version=version)
        self._base = parcels
        self._loaded = DeltaManifest(version=version, base_version=version, parcels=())
        return SentWeights(num_bytes=sum(parcel.num_bytes for parcel in parcels), fraction=1.0)

    def _sent(self, manifest: DeltaManifest) -> SentWeights:
        pairs = list(zip(self._base, manifest.parcels, strict=True))
        num_elements = sum(
            count_sent_elements(base.entries, [FULL_TENSOR] * len(base.entries))
            for base, _ in pairs
        )
        fraction = (
            sum(count_sent_elements(base.entries, changes.counts) for base, changes in pairs)
            / num_elements
        )
        return SentWeights(
            num_bytes=sum(changes.num_bytes for _, changes in pairs), fraction=fraction
        )

    def _changes_folder(self, version: int) -> Path:
        return self._folder / f"changes-{version}"

    def _remove(self, folder: Path) -> None:
        self._actor.run(remove_folder, [(str(folder),)] * self._actor.num_workers)


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
    """Runs on every rank of the actor: rank 0 brings the whole set's files up to date and writes what changed since.

    Args:
        worker: of the actor.
        base: the files of the whole set.
        loaded: the changes that every server has; they get into those files, which may have happened already.
        version: of the weights now.
        folder: for the changes.
        bucket_bytes: as when the whole set was written.
        with_digest: whether checksums are made.
        max_share: see ``find_changes``.

    Raises:
        WeightError: there is no room for them, or the weights have other names, shapes or types; raised once every rank has been through
            the whole stream, so that none is left waiting.
    """
    manifest = DeltaManifest(version=version, base_version=loaded.version, parcels=())
    with worker.export_weights() as stream:
        if not worker.is_first:
            for _ in stream:
                pass
            return manifest
        try:
            held = [_update_bucket_file(parcel, loaded, place) for place, parcel in enumerate(base)]
            recreate_folder(Path(folder))
            parcels = []
            for place, (part, entries) in enumerate(
                match_buckets(stream, [p.entries for p in base], bucket_bytes=bucket_bytes)
            ):
                found = compute_delta(part, held[place], max_changed_fraction=max_changed_fraction)
                parcels.append(
                    write_delta_file(
                        part, found, entries, Path(folder) / f"{place:05d}", with_digest=with_digest
                    )
                )
        except (WeightError, OSError) as error:
            for _ in stream:
                pass
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise WeightError(
                    f"changes of weights can't be written into {folder}: {error.strerror}."
                ) from error
            raise
    return replace(manifest, parcels=tuple(parcels))


def _update_bucket_file(parcel: PackedBucket, loaded: DeltaManifest, place: int) -> list[Tensor]:
    """A bucket of the whole set, mapped from its file, after the changes that every server has."""
    assert parcel.path is not None
    data = open_mapped_file(Path(parcel.path), num_bytes=parcel.num_bytes, is_shared=True)
    held = [weight.tensor for weight in unpack_tensors(data, parcel)]
    if loaded.parcels:
        changes = loaded.parcels[place]
        apply_delta(held, open_delta_file(changes), parcel.entries, changes.counts)
    return held
