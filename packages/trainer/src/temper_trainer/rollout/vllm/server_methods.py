"""The methods of a server that its client can call.

Arguments and results are decoded to exactly the annotated types, and nothing else can be called, so
a new method of the engine is callable once it is declared here.
"""

from collections.abc import Sequence
from typing import Protocol

from temper_trainer.rollout.packed_bucket import PackedBucket
from temper_trainer.rollout.weight_channel import ChannelSpec
from temper_trainer.rollout.weight_delta import DeltaManifest
from temper_trainer.types import Completion, SamplingRequest

PromptLogprobs = tuple[list[float], list[list[int]], list[list[float]]]
"""Log-probs of the given tokens, ids of the most likely tokens, and their log-probs."""


class EngineMethods(Protocol):
    """Methods that the server passes on to its engine."""

    def version(self) -> int:
        """Return the version of the weights."""
        ...

    def places(self) -> list[tuple[str, str | None]]:
        """Return the host and the GPU of every worker."""
        ...

    def logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of every token but the first of each sequence."""
        ...

    def judge(self, rows: Sequence[tuple[Sequence[int], int]], top_k: int) -> list[PromptLogprobs]:
        """Answer as a teacher; see `VllmEngine.judge`."""
        ...

    def join_channel(self, channel: ChannelSpec) -> None:
        """Let every worker join the trainer's channel."""
        ...

    def load_files(self, parcels: Sequence[PackedBucket], version: int) -> int:
        """Load a set of weights from shared memory; return its version."""
        ...

    def load_delta(self, parcels: Sequence[PackedBucket], manifest: DeltaManifest) -> int:
        """Load a set of weights with its changes from shared memory; return its version."""
        ...

    def receive_weights(
        self, parcels: Sequence[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive a set of weights through the channel; return its version."""
        ...

    def cached_version(self) -> int:
        """Return the version of the weights whose changes every worker can take."""
        ...

    def receive_delta(
        self, parcels: Sequence[PackedBucket], base_version: int, version: int
    ) -> int:
        """Receive the changes of a set through the channel; return the new version."""
        ...

    def load_adapter(self, directory: str, version: int) -> int:
        """Load a LoRA adapter from a directory; return its version."""
        ...

    def sleep(self) -> None:
        """Release memory until the next weights arrive."""
        ...

    def wake(self) -> None:
        """Take memory again."""
        ...


class ServerMethods(EngineMethods, Protocol):
    """`EngineCalls` and what the server itself answers."""

    def sample(self, requests: list[SamplingRequest]) -> list[Completion]:
        """Return one completion for each request, in their order."""
        ...

    def interrupt(self) -> None:
        """End every open request with the tokens that it has."""
        ...
