"""State that the sending ranks of the actor keep between two publishes.

A delta is the difference to the weights that were sent last, so a sender keeps a CPU copy of them.
The functions here run inside training workers, and their state stays on the worker. The transport
that calls them is in the driver. It can only send functions and plain arguments to a worker, so it
cannot hold the state itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from temper_engine_api.distributed.rendezvous import StoreServer
from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import TensorEntry, plan_layout, split_into_buckets
from temper_trainer.rollout.weight_channel import WeightChannel
from temper_trainer.weight_sync.buckets import WeightExporter

Entries = tuple[TensorEntry, ...]
"""Layout of one bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWeights:
    """The weights that were sent last, on the CPU."""

    version: int
    entries: tuple[Entries, ...]
    """Layout of each bucket."""
    tensors: tuple[tuple[Tensor, ...], ...]
    """Tensors of each bucket; read-only, except that the next delta updates them in place."""

    @property
    def num_elements(self) -> int:
        """Number of elements in all tensors."""
        return sum(tensor.numel() for bucket in self.tensors for tensor in bucket)


@dataclass(slots=True)
class SenderState:
    """State that one actor rank keeps for its transports."""

    cached: dict[str, CachedWeights] = field(default_factory=dict)
    """Last sent weights by the key of their transport."""
    stores: dict[str, StoreServer] = field(default_factory=dict)
    """TCP stores of channels that are not open yet, by address and port."""
    channels: dict[str, WeightChannel] = field(default_factory=dict)
    """Open channels, by address and port of their store."""


class WeightSender(WeightExporter, Protocol):
    """A training worker that keeps state for transports."""

    @property
    def rank(self) -> int:
        """Rank in the actor's process group."""
        ...

    @property
    def transport_state(self) -> dict[str, object]:
        """State of transports, by name."""
        ...


def get_sender_state(worker: WeightSender) -> SenderState:
    """Return this worker's state, created at the first use."""
    state = worker.transport_state.setdefault("sender", SenderState())
    assert isinstance(state, SenderState)
    return state


def take_cached_weights(worker: WeightSender, key: str, *, version: int) -> CachedWeights:
    """Return the weights that were sent as `version` and remove them from the cache.

    Until the next delta has arrived everywhere, it is unknown which weights the receivers have. If
    sending fails, the cache stays empty and the next publish sends all weights.

    Raises:
        WeightError: If they are not cached.
    """
    cached = get_sender_state(worker).cached.pop(key, None)
    if cached is None or cached.version != version:
        raise WeightError(
            f"the actor's rank 0 does not have weights {version} any more, so it cannot compute a "
            "delta to them: publish the weights again."
        )
    return cached


def drop_cached_weights(worker: WeightSender, key: str) -> None:
    """Free a transport's cached weights; runs on every actor rank."""
    get_sender_state(worker).cached.pop(key, None)


def iterate_checked_buckets(
    stream: Iterator[NamedWeight], entries: Sequence[Entries], *, bucket_bytes: int
) -> Iterator[tuple[list[NamedWeight], Entries]]:
    """Split a stream into buckets and compare each with the layout that the receivers know.

    Raises:
        WeightError: If names, shapes or dtypes differ from the layout.
    """
    buckets = split_into_buckets(stream, bucket_bytes=bucket_bytes)
    for expected in entries:
        bucket = next(buckets, None)
        if bucket is None or plan_layout(bucket)[0] != expected:
            raise WeightError(
                "the actor's weights have other names, shapes or dtypes than when the first set "
                "was sent: start the run again."
            )
        yield bucket, expected
