"""The methods of a server that the trainer can call.

Arguments and results are decoded to exactly the annotated types, and no other method can be
called. A new method of the engine becomes callable when it is declared here.
"""

from collections.abc import Sequence
from typing import Protocol

from temper_trainer.rollout.packed_bucket import PackedBucket
from temper_trainer.rollout.weight_channel import ChannelSpec
from temper_trainer.rollout.weight_delta import DeltaManifest
from temper_trainer.types import Completion, SamplingRequest

PromptLogprobs = tuple[list[float], list[list[int]], list[list[float]]]
"""Log-probs for the given tokens, ids of the most likely tokens, and their log-probs."""


class EngineMethods(Protocol):
    """Methods that the server forwards to its engine."""

    def version(self) -> int:
        """Return the weight version."""
        ...

    def device_locations(self) -> list[tuple[str, str | None]]:
        """Return host and GPU for each worker."""
        ...

    def compute_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs for every token except each sequence's first."""
        ...

    def score_prompts(
        self, rows: Sequence[tuple[Sequence[int], int]], top_k: int
    ) -> list[PromptLogprobs]:
        """Return a teacher's log-probs; see `VllmEngine.score_prompts`."""
        ...

    def join_channels(self, channels: Sequence[ChannelSpec]) -> None:
        """Let every worker join a channel of the trainer, and leave an earlier one.

        Args:
            channels: A spec for each worker. Workers on the GPUs of several ranks of the actor get
                channels of different ranks.
        """
        ...

    def load_files(self, buckets: Sequence[PackedBucket], version: int) -> int:
        """Load all weights from files in shared memory; return their version."""
        ...

    def load_delta(self, buckets: Sequence[PackedBucket], manifest: DeltaManifest) -> int:
        """Load all weights and a delta from files in shared memory; return the new version."""
        ...

    def receive_weights(
        self, buckets: Sequence[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive all weights through the channel; return their version."""
        ...

    def cached_version(self) -> int:
        """Return the weight version that every worker can apply a delta to, or -1."""
        ...

    def receive_delta(
        self, buckets: Sequence[PackedBucket], base_version: int, version: int
    ) -> int:
        """Receive a delta through the channel; return the new version."""
        ...

    def load_adapter(self, directory: str, version: int) -> int:
        """Load a LoRA adapter from a directory; return its version."""
        ...

    def sleep(self) -> None:
        """Free memory until the next weights arrive."""
        ...

    def wake(self) -> None:
        """Allocate the memory again."""
        ...


class ServerMethods(EngineMethods, Protocol):
    """`EngineMethods` and the methods of the server itself."""

    def sample(self, requests: list[SamplingRequest]) -> list[Completion]:
        """Return one completion for each request, in their order."""
        ...

    def interrupt(self, call: int | None = None) -> None:
        """End every open request, or those of one `sample` call, with the tokens that it has."""
        ...
