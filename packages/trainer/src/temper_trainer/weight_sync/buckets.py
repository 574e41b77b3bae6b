"""Split named weights into buckets of bounded size with checksums, and check them on arrival."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightEntry, WeightStream, hash_tensors

DEFAULT_BUCKET_BYTES = 256 << 20
"""Large enough that per-bucket costs vanish, small enough that two fit next to a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Complete tensors on their way to a sampler in the same process.

    Example:
        >>> weights = [NamedWeight(name, torch.ones(3)) for name in ("a.weight", "b.weight")]
        >>> buckets = list(pack_buckets(weights, bucket_bytes=12))
        >>> [(bucket.index, bucket.is_last, bucket.num_bytes) for bucket in buckets]
        [(0, False, 12), (1, True, 12)]
        >>> buckets[1].entries[0].name, buckets[1].tensors[0].tolist()
        ('b.weight', [1.0, 1.0, 1.0])
    """

    index: int
    """Position in the set, from 0."""
    is_last: bool
    entries: tuple[WeightEntry, ...]
    """Each tensor's name, shape and dtype."""
    tensors: tuple[Tensor, ...]
    """Contiguous CPU tensors that the bucket owns: never views into a parameter."""
    checksum: str
    """Result of `hash_tensors` for the tensors."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class WeightExporter(Protocol):
    """The methods of a training worker that publishing needs."""

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the role."""
        ...

    def export_weights(self) -> WeightStream:
        """Return a stream of full tensors, which every rank must read to its end (collective)."""
        ...


def export_buckets(worker: WeightExporter, bucket_bytes: int) -> list[WeightBucket]:
    """Return all weights on rank 0 and an empty list on other ranks; runs on every actor rank."""
    if not worker.is_first:
        participate_in_export(worker)
        return []
    with worker.export_weights() as stream:
        return list(pack_buckets(stream, bucket_bytes=bucket_bytes))


def participate_in_export(worker: WeightExporter) -> None:
    """Take part in the collectives of an export without keeping its tensors."""
    with worker.export_weights() as stream:
        # Gathering a sharded tensor is a collective, so every rank must ask for every tensor.
        for _ in stream:
            pass


def pack_buckets(
    stream: Iterable[NamedWeight], *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Copy a stream into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket."""
    pending: list[NamedWeight] = []
    size, index = 0, 0
    for weight in stream:
        weight_bytes = weight.tensor.numel() * weight.tensor.element_size()
        if pending and size + weight_bytes > bucket_bytes:
            yield _make_bucket(pending, index=index, is_last=False)
            pending, size, index = [], 0, index + 1
        # Copied at once, because the stream may reuse its memory for the next tensor.
        pending.append(NamedWeight(weight.name, copy_to_cpu(weight.tensor)))
        size += weight_bytes
    yield _make_bucket(pending, index=index, is_last=True)


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in CPU memory."""
    # One call: .cpu().contiguous() would copy a transposed tensor twice.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def unpack_buckets(buckets: Iterable[WeightBucket]) -> Iterator[NamedWeight]:
    """Yield the weights of a set of buckets.

    Raises:
        WeightError: If a bucket is damaged, missing, or out of order.
    """
    expected, is_complete = 0, False
    for bucket in buckets:
        if bucket.index != expected or is_complete:
            raise WeightError(
                f"weight bucket {bucket.index} arrived, but bucket {expected} was expected: "
                "publish the weights again."
            )
        if hash_tensors(bucket.tensors) != bucket.checksum:
            raise WeightError(
                f"weight bucket {bucket.index} arrived damaged (checksum differs): "
                "publish the weights again."
            )
        for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
            yield NamedWeight(entry.name, tensor)
        expected, is_complete = expected + 1, bucket.is_last
    if not is_complete:
        raise WeightError(
            f"the weights ended after {expected} buckets, but the last bucket is missing: "
            "publish the weights again."
        )


def _make_bucket(weights: list[NamedWeight], *, index: int, is_last: bool) -> WeightBucket:
    tensors = tuple(weight.tensor for weight in weights)
    entries = tuple(
        WeightEntry(name=w.name, shape=tuple(w.tensor.shape), dtype=w.tensor.dtype) for w in weights
    )
    return WeightBucket(
        index=index,
        is_last=is_last,
        entries=entries,
        tensors=tensors,
        checksum=hash_tensors(tensors),
    )
