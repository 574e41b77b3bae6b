"""What carries a set of weights from the actor to the sampler; the publisher numbers the sets and checks what arrived."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from temper_engine_api.errors import EngineStateError
from temper_engine_api.weights import NamedWeight
from temper_trainer.weight_sync.buckets import WeightBucket, WeightExporter, unpack_buckets

T = TypeVar("T")


class RankGroup(Protocol):
    """The actor's worker group, as far as a transport is concerned."""

    @property
    def num_workers(self) -> int:
        """Ranks."""
        ...

    @property
    def num_updates(self) -> int:
        """Updates that were begun: while it stays the same, the weights do."""
        ...

    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call a function of a worker on every rank at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What one set took."""

    num_bytes: int
    """Of weights, places and alignment, counted once however many receivers there are."""
    fraction: float
    """Of the elements of a whole set, those that were sent; 1 for a whole set."""


class Transport(Protocol):
    """One way for a set of weights."""

    def send(self, version: int) -> SentWeights:
        """Hand over the actor's present weights; afterwards the sampler reports the version.

        Raises:
            WeightError: the set is damaged or does not fit; the sampler is not to be used then.
        """
        ...

    def close(self) -> None:
        """Free what the journey needed."""
        ...


class StreamReceiver(Protocol):
    """A sampler that loads weights in its own process."""

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load a whole set, strict both ways."""
        ...


class StreamTransport:
    """Buckets with checksums, in one process."""

    def __init__(
        self, *, export: Callable[[], Iterable[WeightBucket]], sampler: StreamReceiver
    ) -> None:
        self._export = export
        self._sampler = sampler

    def send(self, version: int) -> SentWeights:
        """Export, check, load."""
        buckets = list(self._export())
        self._sampler.load_weights(unpack_buckets(buckets), version=version)
        return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in buckets), fraction=1.0)

    def close(self) -> None:
        """Nothing is held."""


class InProcessTransport:
    """Passes the tensors of an actor of one rank to a sampler in the same process.

    The tensors stay on their device. Nothing is sent, so there is no checksum to compare.
    """

    def __init__(self, *, actor: RankGroup, sampler: StreamReceiver) -> None:
        self._actor = actor
        self._sampler = sampler

    def send(self, version: int) -> SentWeights:
        """Load the actor's current weights into the sampler."""
        (num_bytes,) = self._actor.run(load_into_sampler, [(self._sampler, version)])
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Do nothing: no resources are kept."""


def load_into_sampler(worker: WeightExporter, sampler: StreamReceiver, version: int) -> int:
    """Load the worker's weights into a sampler of its process; return their size in bytes."""
    num_bytes = 0

    def count(stream: Iterable[NamedWeight]) -> Iterator[NamedWeight]:
        nonlocal num_bytes
        for weight in stream:
            num_bytes += weight.tensor.numel() * weight.tensor.element_size()
            yield weight

    with worker.export_weights() as stream:
        sampler.load_weights(count(stream), version=version)
    return num_bytes


@runtime_checkable
class WeightFetcher(Protocol):
    """A sampler in another process, which has its own way to the actor's."""

    def fetch_weights(
        self, actor: RankGroup, *, bucket_bytes: int, with_digest: bool, version: int
    ) -> int:
        """Load the actor's present weights, strict both ways; returns their bytes."""
        ...


class FetchTransport:
    """The sampler's own way: through Ray's object store, past the driver."""

    def __init__(
        self, *, actor: RankGroup, sampler: WeightFetcher, bucket_bytes: int, with_digest: bool
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest

    def send(self, version: int) -> SentWeights:
        """Let the sampler fetch."""
        num_bytes = self._sampler.fetch_weights(
            self._actor,
            bucket_bytes=self._bucket_bytes,
            with_digest=self._with_digest,
            version=version,
        )
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Nothing is held."""


class NullTransport:
    """For a sampler that keeps the weights it was opened with."""

    def send(self, version: int) -> SentWeights:
        """Refuse: there is no actor.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError("this task has no actor whose weights could be published.")

    def close(self) -> None:
        """Nothing is held."""
