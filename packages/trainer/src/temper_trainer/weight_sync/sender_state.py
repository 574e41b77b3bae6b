"""The actor's side of changes: rank 0 keeps the set that it sent last, and compares the next one with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import TensorEntry, plan_layout, split_into_buckets
from temper_trainer.weight_sync.buckets import WeightExporter

Entries = tuple[TensorEntry, ...]
_sets: dict[str, "CachedWeights"] = {}
"""In this process, by the transport's own key: a worker's method has no place to keep one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWeights:
    """A set of weights in buckets, on the CPU."""

    version: int
    """As which it was sent."""
    entries: tuple[Entries, ...]
    """Of each bucket."""
    tensors: tuple[tuple[Tensor, ...], ...]
    """Of each bucket; nobody else writes into them."""

    @property
    def num_elements(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() for bucket in self.tensors for tensor in bucket)


def cache_weights(key: str, held: CachedWeights) -> None:
    """Keep a set in place of an earlier one."""
    _sets[key] = held


def take_cached_weights(key: str, *, version: int) -> CachedWeights:
    """The set that was sent as this version; it is kept no longer, until it is known what the receivers have now.

    Raises:
        WeightError: it is not here.
    """
    held = _sets.pop(key, None)
    if held is None or held.version != version:
        raise WeightError(
            f"the actor's rank 0 does not hold weights {version} any more, so it can't say what changed since."
        )
    return held


def drop_cached_weights(worker: WeightExporter, key: str) -> None:
    """Runs on every rank of the actor: no more changes are sent."""
    _sets.pop(key, None)


def match_buckets(
    stream: Iterator[NamedWeight], entries: Sequence[Entries], *, bucket_bytes: int
) -> Iterator[tuple[list[NamedWeight], Entries]]:
    """A stream in the buckets that were agreed on.

    Raises:
        WeightError: it has other names, shapes or types.
    """
    parts = split_into_buckets(stream, bucket_bytes=bucket_bytes)
    for expected in entries:
        part = next(parts, None)
        if part is None or plan_layout(part)[0] != expected:
            raise WeightError(
                "the actor's weights have other names, shapes or types than when the first set was sent."
            )
        yield part, expected


def join_export(worker: WeightExporter) -> None:
    """On every rank but the first: take part in the gathering of a set."""
    with worker.export_weights() as stream:
        for _ in stream:
            pass
