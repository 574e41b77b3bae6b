"""Changes through the driver, for a transformers sampler in one process or behind Ray's object store."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from temper_trainer.rollout.changes import (
    ChangeBucket,
    StaleBaseError,
    apply_changes,
    fill_changes,
    find_changes,
    size_of,
)
from temper_trainer.rollout.parcels import cut, digest_of, layout_of
from temper_trainer.weight_sync.buckets import ExportsWeights, own_copy
from temper_trainer.weight_sync.held import HeldSet, drain, forget_held, hold, in_step, take_held
from temper_trainer.weight_sync.transport import RunsOnRanks, Sent, Transport

logger = logging.getLogger(__name__)


@runtime_checkable
class TakesChanges(Protocol):
    """A sampler that also takes what changed since the set that it holds."""

    def load_changes(
        self, buckets: Sequence[ChangeBucket], *, base_version: int, version: int
    ) -> None:
        """All of them or none.

        Raises:
            StaleBaseError: it holds other weights than ``base_version``.
            WeightError: a bucket is damaged or does not fit.
        """
        ...


class StreamChangeTransport:
    """The first set whole, then changes; whole again for a sampler that holds something else."""

    def __init__(
        self,
        whole: Transport,
        *,
        actor: RunsOnRanks,
        sampler: TakesChanges,
        bucket_bytes: int,
        max_share: float,
    ) -> None:
        self._whole = whole
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._max_share = max_share
        self._key = uuid.uuid4().hex
        self._base_version: int | None = None

    def send(self, version: int) -> Sent:
        """Export, compare, load."""
        base_version, self._base_version = self._base_version, None
        sent = None if base_version is None else self._send_changes(base_version, version=version)
        if sent is None:
            sent = self._whole.send(version)
            # Gathered once more, so that whoever carries a whole set need not know of changes; rare, and nothing trains in between.
            self._actor.run(
                keep_set, [(self._key, self._bucket_bytes, version)] * self._actor.num_workers
            )
        self._base_version = version
        return sent

    def close(self) -> None:
        """Let rank 0 forget the set."""
        self._whole.close()
        self._actor.run(forget_held, [(self._key,)] * self._actor.num_workers)

    def _send_changes(self, base_version: int, *, version: int) -> Sent | None:
        """None where the sampler holds something else."""
        arguments = (self._key, self._bucket_bytes, version, base_version, self._max_share)
        buckets = self._actor.run(export_changes, [arguments] * self._actor.num_workers)[0]
        try:
            self._sampler.load_changes(buckets, base_version=base_version, version=version)
        except StaleBaseError as error:
            logger.warning("%s The whole set is sent.", error)
            return None
        share = sum(bucket.num_sent for bucket in buckets) / sum(
            bucket.num_elements for bucket in buckets
        )
        return Sent(num_bytes=sum(len(bucket.data) for bucket in buckets), share=share)


def keep_set(worker: ExportsWeights, key: str, bucket_bytes: int, version: int) -> None:
    """Runs on every rank of the actor: rank 0 keeps the whole set, the others take part in the gathering."""
    if not worker.is_first:
        drain(worker)
        return
    forget_held(
        worker, key
    )  # an earlier set would stay until this one is complete: the model twice
    entries, tensors = [], []
    with worker.export_weights() as stream:
        for part in cut(stream, bucket_bytes=bucket_bytes):
            entries.append(layout_of(part)[0])
            tensors.append(tuple(own_copy(weight.tensor) for weight in part))
    hold(key, HeldSet(version=version, entries=tuple(entries), tensors=tuple(tensors)))


def export_changes(
    worker: ExportsWeights,
    key: str,
    bucket_bytes: int,
    version: int,
    base_version: int,
    max_share: float,
) -> list[ChangeBucket]:
    """Runs on every rank of the actor: rank 0 returns what changed since ``base_version``, the others take part in the gathering.

    Raises:
        WeightError: rank 0 does not hold that version, or the weights have other names, shapes or types.
    """
    if not worker.is_first:
        drain(worker)
        return []
    held = take_held(key, version=base_version)
    buckets = []
    with worker.export_weights() as stream:
        for index, (part, entries) in enumerate(
            in_step(stream, held.entries, bucket_bytes=bucket_bytes)
        ):
            found = find_changes(part, held.tensors[index], max_share=max_share)
            counts = tuple(change.count for change in found)
            data = torch.zeros(size_of(entries, counts), dtype=torch.uint8)
            fill_changes(data, found, entries)
            apply_changes(held.tensors[index], data, entries, counts)
            is_last = index == len(held.entries) - 1
            digest = digest_of(data)
            buckets.append(
                ChangeBucket(
                    index=index,
                    is_last=is_last,
                    entries=entries,
                    counts=counts,
                    data=data,
                    digest=digest,
                )
            )
    hold(key, replace(held, version=version))
    return buckets
