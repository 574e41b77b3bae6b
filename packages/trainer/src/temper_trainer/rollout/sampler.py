"""What a sampler is: tokens in, tokens out, and every completion says which weights made it."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from temper_engine_api.weights import NamedWeight
from temper_trainer.types import Completion, SamplingRequest


@runtime_checkable
class Sampler(Protocol):
    """Completes prompts with a numbered set of weights that arrives from outside."""

    @property
    def weight_version(self) -> int:
        """Of the weights held now; 0 until the first load."""
        ...

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One completion per request, in the order of the requests.

        Raises:
            ConfigError: prompt and max_tokens together are longer than the model's positions, or two requests share an id.
        """
        ...

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Take a whole set of weights under Hugging Face names; on an error the old set stays.

        Raises:
            WeightError: a name is missing, unexpected or repeated, or a shape differs.
        """
        ...

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Log-probs of every token but the first of each sequence, given the earlier ones; float32, after temperature (above 0)."""
        ...

    def close(self) -> None:
        """Free memory; nothing may be called afterwards."""
        ...


@runtime_checkable
class InterruptibleSampler(Sampler, Protocol):
    """A sampler whose open requests can be ended from another thread."""

    def interrupt(self) -> None:
        """Let every open ``sample`` return what it has, unfinished completions with FinishReason.INTERRUPTED; new weights end the state."""
        ...
