"""Transports to a transformers sampler: in the same process, or in a separate process on Ray."""

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import compute_digest, plan_layout, split_into_buckets
from temper_trainer.rollout.weight_delta import (
    DeltaBucket,
    StaleBaseError,
    apply_delta,
    compute_delta,
    count_delta_bytes,
    pack_delta,
)
from temper_trainer.weight_sync.buckets import (
    WeightBucket,
    WeightExporter,
    copy_to_cpu,
    participate_in_export,
    unpack_buckets,
)
from temper_trainer.weight_sync.sender_state import (
    CachedWeights,
    WeightSender,
    drop_cached_weights,
    get_sender_state,
    iterate_checked_buckets,
    take_cached_weights,
)
from temper_trainer.weight_sync.transport import RankGroup, SentWeights, Transport

logger = logging.getLogger(__name__)


class StreamReceiver(Protocol):
    """A sampler that loads weights in this process."""

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load all weights; refuse missing and unexpected names."""
        ...


@runtime_checkable
class WeightFetcher(Protocol):
    """A sampler in another process that receives the actor's weights without the driver."""

    def fetch_weights(
        self, actor: RankGroup, *, bucket_bytes: int, with_digest: bool, version: int
    ) -> int:
        """Load the actor's current weights and return their size in bytes."""
        ...


@runtime_checkable
class DeltaReceiver(Protocol):
    """A sampler that can update its weights with a delta."""

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """Apply all buckets, or none if one of them is refused.

        Raises:
            StaleBaseError: If the sampler has other weights than `base_version`.
            WeightError: If a bucket is damaged or does not fit.
        """
        ...


class StreamTransport:
    """Sends buckets with checksums through the driver, for samplers without another way."""

    def __init__(
        self, *, export: Callable[[], Iterable[WeightBucket]], sampler: StreamReceiver
    ) -> None:
        self._export = export
        self._sampler = sampler

    def send(self, version: int) -> SentWeights:
        """Export all weights and load them."""
        buckets = list(self._export())
        self._sampler.load_weights(unpack_buckets(buckets), version=version)
        return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in buckets), fraction=1.0)

    def close(self) -> None:
        """Free nothing."""


class InProcessTransport:
    """Passes tensors from a one-rank actor to a sampler in the same process.

    The tensors stay on their device. Nothing is copied in between, so there is no checksum.
    """

    def __init__(self, *, actor: RankGroup, sampler: StreamReceiver) -> None:
        self._actor = actor
        self._sampler = sampler

    def send(self, version: int) -> SentWeights:
        """Load the actor's current weights into the sampler."""
        (num_bytes,) = self._actor.run_on_all(load_into_sampler, self._sampler, version)
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Free nothing."""


def load_into_sampler(worker: WeightExporter, sampler: StreamReceiver, version: int) -> int:
    """Load the worker's weights into a sampler in its process; return their size in bytes."""
    num_bytes = 0

    def count_bytes(stream: Iterable[NamedWeight]) -> Iterator[NamedWeight]:
        nonlocal num_bytes
        for weight in stream:
            num_bytes += weight.tensor.numel() * weight.tensor.element_size()
            yield weight

    with worker.export_weights() as stream:
        sampler.load_weights(count_bytes(stream), version=version)
    return num_bytes


class FetchTransport:
    """Sends weights through Ray's object store (`weight_sync.transport=object_store`)."""

    def __init__(
        self, *, actor: RankGroup, sampler: WeightFetcher, bucket_bytes: int, with_digest: bool
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest

    def send(self, version: int) -> SentWeights:
        """Let the sampler fetch all weights."""
        num_bytes = self._sampler.fetch_weights(
            self._actor,
            bucket_bytes=self._bucket_bytes,
            with_digest=self._with_digest,
            version=version,
        )
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Free nothing."""


class StreamDeltaTransport:
    """Sends all weights once and deltas afterwards, through the driver.

    If the sampler has other weights than expected, all weights are sent again.
    """

    def __init__(
        self,
        full_transport: Transport,
        *,
        actor: RankGroup,
        sampler: DeltaReceiver,
        bucket_bytes: int,
        max_changed_fraction: float,
    ) -> None:
        self._full_transport = full_transport
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._max_changed_fraction = max_changed_fraction
        # Unique, because several transports may keep state on one worker.
        self._key = uuid.uuid4().hex
        self._base_version: int | None = None

    def send(self, version: int) -> SentWeights:
        """Send a delta if possible, otherwise all weights."""
        # None while sending, because after an error the sampler's weights are unknown.
        base_version, self._base_version = self._base_version, None
        sent = None if base_version is None else self._send_delta(base_version, version=version)
        if sent is None:
            sent = self._full_transport.send(version)
            # Export a second time to keep deltas out of the full transports. This is rare, and the
            # weights cannot change in between.
            self._actor.run_on_all(cache_current_weights, self._key, self._bucket_bytes, version)
        self._base_version = version
        return sent

    def close(self) -> None:
        """Free the cached weights."""
        self._full_transport.close()
        self._actor.run_on_all(drop_cached_weights, self._key)

    def _send_delta(self, base_version: int, *, version: int) -> SentWeights | None:
        """Send a delta; return None if the sampler does not have `base_version`."""
        buckets = self._actor.run_on_all(
            export_delta,
            self._key,
            self._bucket_bytes,
            version,
            base_version,
            self._max_changed_fraction,
        )[0]
        try:
            self._sampler.load_delta(buckets, base_version=base_version, version=version)
        except StaleBaseError as error:
            logger.warning("%s Sending all weights instead.", error)
            return None
        num_sent = sum(bucket.num_sent_elements for bucket in buckets)
        return SentWeights(
            num_bytes=sum(len(bucket.data) for bucket in buckets),
            fraction=num_sent / sum(bucket.num_elements for bucket in buckets),
        )


def cache_current_weights(worker: WeightSender, key: str, bucket_bytes: int, version: int) -> None:
    """Copy all weights into the cache of rank 0; runs on every actor rank."""
    if not worker.is_first:
        participate_in_export(worker)
        return
    # Free the old copy first, to never have two copies of the model in memory.
    drop_cached_weights(worker, key)
    entries, tensors = [], []
    with worker.export_weights() as stream:
        for bucket in split_into_buckets(stream, bucket_bytes=bucket_bytes):
            entries.append(plan_layout(bucket)[0])
            tensors.append(tuple(copy_to_cpu(weight.tensor) for weight in bucket))
    get_sender_state(worker).cached[key] = CachedWeights(
        version=version, entries=tuple(entries), tensors=tuple(tensors)
    )


def export_delta(
    worker: WeightSender,
    key: str,
    bucket_bytes: int,
    version: int,
    base_version: int,
    max_changed_fraction: float,
) -> list[DeltaBucket]:
    """Return the delta to `base_version` on rank 0, and an empty list on other actor ranks.

    Raises:
        WeightError: If rank 0 did not cache that version, or the weights have another layout.
    """
    if not worker.is_first:
        participate_in_export(worker)
        return []
    cached = take_cached_weights(worker, key, version=base_version)
    buckets = []
    with worker.export_weights() as stream:
        for index, (bucket, entries) in enumerate(
            iterate_checked_buckets(stream, cached.entries, bucket_bytes=bucket_bytes)
        ):
            delta = compute_delta(
                bucket, cached.tensors[index], max_changed_fraction=max_changed_fraction
            )
            counts = tuple(tensor_delta.count for tensor_delta in delta)
            # Start from zeros, so that padding between tensors has a defined checksum.
            data = torch.zeros(count_delta_bytes(entries, counts), dtype=torch.uint8)
            pack_delta(data, delta, entries)
            # Update the cached copy with the sent bytes, not with the weights, so that it equals
            # the sampler's weights exactly.
            apply_delta(cached.tensors[index], data, entries, counts)
            buckets.append(
                DeltaBucket(
                    index=index,
                    is_last=index == len(cached.entries) - 1,
                    entries=entries,
                    counts=counts,
                    data=data,
                    digest=compute_digest(data),
                )
            )
    get_sender_state(worker).cached[key] = replace(cached, version=version)
    return buckets
