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
from temper_trainer.rollout.changes import (
    WHOLE,
    ChangeManifest,
    apply_changes,
    find_changes,
    num_sent,
    open_change_parcel,
    write_change_parcel,
)
from temper_trainer.rollout.parcels import Parcel, named_weights, open_file
from temper_trainer.rollout.replica import Replica
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.weight_sync.buckets import ExportsWeights
from temper_trainer.weight_sync.held import in_step
from temper_trainer.weight_sync.shared_memory import (
    folder_for,
    fresh,
    remove,
    remove_folder,
    write_set,
)
from temper_trainer.weight_sync.transport import RunsOnRanks, Sent


class SharedChangeTransport:
    """See the module. The files of the whole set are brought up to date when the next changes are looked for."""

    def __init__(
        self,
        *,
        actor: RunsOnRanks,
        sampler: VllmSampler,
        bucket_bytes: int,
        with_digest: bool,
        max_share: float,
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._max_share = max_share
        self._folder = folder_for(actor)
        self._base: tuple[Parcel, ...] = ()
        self._loaded = ChangeManifest(version=0, base_version=0, parcels=())
        """What every server has taken on top of the whole set's files."""

    def send(self, version: int) -> Sent:
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
        manifest = self._actor.run(write_changes, [arguments] * self._actor.num_workers)[0]

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_changes", self._base, manifest)

        self._sampler.load(load, version=version)
        self._remove(self._changes_folder(self._loaded.version))
        self._loaded = manifest
        return self._sent(manifest)

    def close(self) -> None:
        """Remove the files."""
        remove(self._folder, actor=self._actor)

    def _send_whole(self, version: int) -> Sent:
        arguments = (str(self._folder / "whole"), self._bucket_bytes, self._with_digest)
        parcels = tuple(self._actor.run(write_set, [arguments] * self._actor.num_workers)[0])

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_files", parcels, version)

        self._sampler.load(load, version=version)
        self._base = parcels
        self._loaded = ChangeManifest(version=version, base_version=version, parcels=())
        return Sent(num_bytes=sum(parcel.num_bytes for parcel in parcels), share=1.0)

    def _sent(self, manifest: ChangeManifest) -> Sent:
        pairs = list(zip(self._base, manifest.parcels, strict=True))
        num_elements = sum(num_sent(base.entries, [WHOLE] * len(base.entries)) for base, _ in pairs)
        share = (
            sum(num_sent(base.entries, changes.counts) for base, changes in pairs) / num_elements
        )
        return Sent(num_bytes=sum(changes.num_bytes for _, changes in pairs), share=share)

    def _changes_folder(self, version: int) -> Path:
        return self._folder / f"changes-{version}"

    def _remove(self, folder: Path) -> None:
        self._actor.run(remove_folder, [(str(folder),)] * self._actor.num_workers)


def write_changes(
    worker: ExportsWeights,
    base: Sequence[Parcel],
    loaded: ChangeManifest,
    version: int,
    folder: str,
    bucket_bytes: int,
    with_digest: bool,
    max_share: float,
) -> ChangeManifest:
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
    manifest = ChangeManifest(version=version, base_version=loaded.version, parcels=())
    with worker.export_weights() as stream:
        if not worker.is_first:
            for _ in stream:
                pass
            return manifest
        try:
            held = [_up_to_date(parcel, loaded, place) for place, parcel in enumerate(base)]
            fresh(Path(folder))
            parcels = []
            for place, (part, entries) in enumerate(
                in_step(stream, [p.entries for p in base], bucket_bytes=bucket_bytes)
            ):
                found = find_changes(part, held[place], max_share=max_share)
                parcels.append(
                    write_change_parcel(
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


def _up_to_date(parcel: Parcel, loaded: ChangeManifest, place: int) -> list[Tensor]:
    """A bucket of the whole set, mapped from its file, after the changes that every server has."""
    assert parcel.path is not None
    data = open_file(Path(parcel.path), num_bytes=parcel.num_bytes, is_shared=True)
    held = [weight.tensor for weight in named_weights(data, parcel)]
    if loaded.parcels:
        changes = loaded.parcels[place]
        apply_changes(held, open_change_parcel(changes), parcel.entries, changes.counts)
    return held
