"""What a sampler of several servers needs of each of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.types import Completion, SamplingRequest


class ReplicaError(TemperError, RuntimeError):
    """A replica died, did not start, or gave no sign of life; says which and shows the end of its log."""


class Replica(Protocol):
    """One server, wherever it runs. After a ReplicaError it is dead until ``restart``."""

    @property
    def name(self) -> str:
        """For sentences, such as ``rollout replica 1``."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of vllm, torch and transformers in its environment; empty before `start`."""
        ...

    def start(self) -> None:
        """Begin, and wait until the model is built; also after a death.

        Raises:
            ReplicaError: with the end of its log.
        """
        ...

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Completions in the order of the requests; interrupted ones may have no tokens."""
        ...

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """A method of the server's engine."""
        ...

    def close(self) -> None:
        """End the server; may be called twice."""
        ...
