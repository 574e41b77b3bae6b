"""Changes through the driver, for a transformers sampler in one process or behind Ray's object store."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from temper_trainer.rollout.packed_bucket import compute_digest, plan_layout, split_into_buckets
from temper_trainer.rollout.weight_delta import (
    DeltaBucket,
    StaleBaseError,
    apply_delta,
    compute_delta,
    count_delta_bytes,
    pack_delta,
)
from temper_trainer.weight_sync.buckets import WeightExporter, copy_to_cpu
from temper_trainer.weight_sync.sender_state import (
    CachedWeights,
    cache_weights,
    drop_cached_weights,
    join_export,
    match_buckets,
    take_cached_weights,
)
from temper_trainer.weight_sync.transport import RankGroup, SentWeights, Transport

logger = logging.getLogger(__name__)


@runtime_checkable
class DeltaReceiver(Protocol):
    """A sampler that also takes what changed since the set that it holds."""

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """All of them or none.

        Raises:
            StaleBaseError: it holds other weights than ``base_version``.
            WeightError: a bucket is damaged or does not fit.
        """
        ...


class StreamDeltaTransport:
    """The first set whole, then changes; whole again for a sampler that holds something else."""

    def __init__(
        self,
        whole: Transport,
        *,
        actor: RankGroup,
        sampler: DeltaReceiver,
        bucket_bytes: int,
        max_changed_fraction: float,
    ) -> None:
        self._whole = whole
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._max_share = max_changed_fraction
        self._key = uuid.uuid4().hex
        self._base_version: int | None = None

    def send(self, version: int) -> SentWeights:
        """Export, compare, load."""
        base_version, self._base_version = self._base_version, None
        sent = None if base_version is None else self._send_changes(base_version, version=version)
        if sent is None:
            sent = self._whole.send(version)
            # Gathered once more, so that whoever carries a whole set need not know of changes; rare, and nothing trains in between.
            self._actor.run(
                cache_current_weights,
                [(self._key, self._bucket_bytes, version)] * self._actor.num_workers,
            )
        self._base_version = version
        return sent

    def close(self) -> None:
        """Let rank 0 forget the set."""
        self._whole.close()
        self._actor.run(drop_cached_weights, [(self._key,)] * self._actor.num_workers)

    def _send_changes(self, base_version: int, *, version: int) -> SentWeights | None:
        """None where the sampler holds something else."""
        arguments = (self._key, self._bucket_bytes, version, base_version, self._max_share)
        buckets = self._actor.run(export_delta, [arguments] * self._actor.num_workers)[0]
        try:
            self._sampler.load_delta(buckets, base_version=base_version, version=version)
        except StaleBaseError as error:
            logger.warning("%s The whole set is sent.", error)
            return None
        fraction = sum(bucket.num_sent_elements for bucket in buckets) / sum(
            bucket.num_elements for bucket in buckets
        )
        return SentWeights(num_bytes=sum(len(bucket.data) for bucket in buckets), fraction=fraction)


def cache_current_weights(
    worker: WeightExporter, key: str, bucket_bytes: int, version: int
) -> None:
    """Runs on every rank of the actor: rank 0 keeps the whole set, the others take part in the gathering."""
    if not worker.is_first:
        join_export(worker)
        return
    drop_cached_weights(
        worker, key
    )  # an earlier set would stay until this one is complete: the model twice
    entries, tensors = [], []
    with worker.export_weights() as stream:
        for part in split_into_buckets(stream, bucket_bytes=bucket_bytes):
            entries.append(plan_layout(part)[0])
            tensors.append(tuple(copy_to_cpu(weight.tensor) for weight in part))
    cache_weights(
        key, CachedWeights(version=version, entries=tuple(entries), tensors=tuple(tensors))
    )


def export_delta(
    worker: WeightExporter,
    key: str,
    bucket_bytes: int,
    version: int,
    base_version: int,
    max_changed_fraction: float,
) -> list[DeltaBucket]:
    """Runs on every rank of the actor: rank 0 returns what changed since ``base_version``, the others take part in the gathering.

    Raises:
        WeightError: rank 0 does not hold that version, or the weights have other names, shapes or types.
    """
    if not worker.is_first:
        join_export(worker)
        return []
    held = take_cached_weights(key, version=base_version)
    buckets = []
    with worker.export_weights() as stream:
        for index, (part, entries) in enumerate(
            match_buckets(stream, held.entries, bucket_bytes=bucket_bytes)
        ):
            found = compute_delta(
                part, held.tensors[index], max_changed_fraction=max_changed_fraction
            )
            counts = tuple(change.count for change in found)
            data = torch.zeros(count_delta_bytes(entries, counts), dtype=torch.uint8)
            pack_delta(data, found, entries)
            apply_delta(held.tensors[index], data, entries, counts)
            is_last = index == len(held.entries) - 1
            digest = compute_digest(data)
            buckets.append(
                DeltaBucket(
                    index=index,
                    is_last=is_last,
                    entries=entries,
                    counts=counts,
                    data=data,
                    digest=digest,
                )
            )
    cache_weights(key, replace(held, version=version))
    return buckets
