"""The interface of a weight transport: it carries the actor's weights to the sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from temper_engine_api.errors import EngineStateError

T = TypeVar("T")


class RankGroup(Protocol):
    """The methods of the actor's worker group that a transport needs."""

    @property
    def num_updates(self) -> int:
        """Number of updates that were started; while it is the same, so are the weights."""
        ...

    def run_on_all(self, call: Callable[..., T], *arguments: object) -> list[T]:
        """Call a function of a worker on every rank, with the same arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The amount of data in one publish."""

    num_bytes: int
    """Bytes for weights, indices and padding, counted once for any number of receivers."""
    fraction: float
    """Fraction of all elements that were sent; 1 unless a delta was sent."""
    problem: str = ""
    """Reason why sending failed; empty if it did not. A transport repeats it with other members."""


class Transport(Protocol):
    """One way from the actor to the sampler."""

    def send(self, version: int) -> SentWeights:
        """Send the actor's current weights; afterwards the sampler reports `version`.

        Raises:
            WeightError: If the weights are damaged or do not fit. The sampler must not be used
                afterwards.
        """
        ...

    def close(self) -> None:
        """Free files, channels and cached weights."""
        ...


class NullTransport:
    """The transport of a task that only evaluates or generates: there is no actor."""

    def send(self, version: int) -> SentWeights:
        """Refuse to send.

        Raises:
            EngineStateError: Always.
        """
        raise EngineStateError(
            f"weights {version} cannot be published, because this task has no actor: use task=rl."
        )

    def close(self) -> None:
        """Free nothing."""
