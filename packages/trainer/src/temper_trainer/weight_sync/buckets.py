"""Named weights cut into buckets, and back; every bucket carries its checksum, the last one closes the set."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightEntry, WeightStream, hash_tensors

DEFAULT_BUCKET_BYTES = 256 << 20
"""Large enough that per-bucket costs vanish, small enough that two fit beside a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Whole tensors in their wire form."""

    index: int
    """Place in the set, from 0."""
    is_last: bool
    """Whether the set ends here."""
    entries: tuple[WeightEntry, ...]
    """Name, shape and dtype of each tensor."""
    tensors: tuple[Tensor, ...]
    """On the CPU, contiguous, owned by the bucket: never a view of a parameter."""
    sha256: str
    """Over the bytes of the tensors."""

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class WeightExporter(Protocol):
    """A training worker, as far as publishing is concerned."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of its role."""
        ...

    def export_weights(self) -> WeightStream:
        """Full tensors; collective."""
        ...


def export_buckets(worker: WeightExporter, bucket_bytes: int) -> list[WeightBucket]:
    """Runs on every rank of the actor: rank 0 returns the whole set, the others take part in the gathering and return nothing."""
    with worker.export_weights() as stream:
        if worker.is_first:
            return list(pack_buckets(stream, bucket_bytes=bucket_bytes))
        for _ in stream:
            pass
    return []


def pack_buckets(
    stream: Iterable[NamedWeight], *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Cut a stream into buckets of at most ``bucket_bytes``, a larger tensor alone in its own."""
    held: list[NamedWeight] = []
    size, index = 0, 0
    for weight in stream:
        weight_bytes = weight.tensor.numel() * weight.tensor.element_size()
        if held and size + weight_bytes > bucket_bytes:
            yield _make_bucket(held, index=index, is_last=False)
            held, size, index = [], 0, index + 1
        held.append(NamedWeight(weight.name, copy_to_cpu(weight.tensor)))
        size += weight_bytes
    yield _make_bucket(held, index=index, is_last=True)


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, in memory of its own; copied once, whatever its strides."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def unpack_buckets(buckets: Iterable[WeightBucket]) -> Iterator[NamedWeight]:
    """The named weights of a set of buckets.

    Raises:
        WeightError: a bucket is damaged, missing, or out of order.
    """
    expected, is_closed = 0, False
    for bucket in buckets:
        if bucket.index != expected or is_closed:
            raise WeightError(
                f"weight bucket {bucket.index} came where {expected} was due: publish the weights again."
            )
        if hash_tensors(bucket.tensors) != bucket.sha256:
            raise WeightError(
                f"weight bucket {bucket.index} arrived damaged (checksum differs): publish the weights again."
            )
        for entry, tensor in zip(bucket.entries, bucket.tensors, strict=True):
            yield NamedWeight(entry.name, tensor)
        expected, is_closed = expected + 1, bucket.is_last
    if not is_closed:
        raise WeightError(
            f"the set of weights ended after {expected} buckets without its last one: publish the weights again."
        )


def _make_bucket(held: list[NamedWeight], *, index: int, is_last: bool) -> WeightBucket:
    tensors = tuple(weight.tensor for weight in held)
    entries = tuple(
        WeightEntry(name=w.name, shape=tuple(w.tensor.shape), dtype=w.tensor.dtype) for w in held
    )
    return WeightBucket(
        index=index, is_last=is_last, entries=entries, tensors=tensors, sha256=hash_tensors(tensors)
    )
