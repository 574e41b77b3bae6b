"""Interfaces for samplers, and for one server of a sampler that has several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from temper_engine_api.errors import ConfigError, TemperError
from temper_engine_api.weights import NamedWeight
from temper_trainer.types import Completion, RefusedRequestError, SamplingRequest


@runtime_checkable
class Sampler(Protocol):
    """Completes prompts with weights that are published under a version."""

    @property
    def weight_version(self) -> int:
        """Version of the current weights; 0 before the first publish."""
        ...

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one completion per request, in request order.

        Only one call may be open at a time.

        Raises:
            RefusedRequestError: If prompt and `max_tokens` together are longer than the model
                allows, or a token id does not exist. No request is then completed.
            ConfigError: If two requests have the same id.
        """
        ...

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load all weights under Hugging Face names; on an error the old weights stay.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs.
        """
        ...

    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the log-prob of every token but the first, given the tokens before it.

        Logits are divided by `temperature` (above 0); log-probs are float32.
        """
        ...

    def close(self) -> None:
        """Free memory; the sampler cannot be used afterwards."""
        ...


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler that decodes all open requests together and returns each when it is finished."""

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        """Return one request's completion; many may be open, all in one event loop.

        Args:
            request: What to complete.
            on_server: Called with the index of the server that gets the request, and again if the
                request moves to another server.

        Raises:
            RefusedRequestError: See `sample`. Other requests are not affected.
        """
        ...


@runtime_checkable
class InterruptibleSampler(Sampler, Protocol):
    """A sampler whose open requests can be interrupted from another thread."""

    def interrupt(self) -> None:
        """Let every `sample` call return now, until the next weights are loaded.

        Unfinished completions have FinishReason.INTERRUPTED.
        """
        ...


def check_requests(
    requests: Sequence[SamplingRequest], *, vocab_size: int, max_length: int, limit: str
) -> None:
    """Refuse requests that a sampler cannot complete.

    Args:
        requests: Requests of one call.
        vocab_size: Token ids are below it.
        max_length: Maximum length of a prompt with its completion.
        limit: Names this length in the message, and what could raise it.

    Raises:
        RefusedRequestError: Names the request and the key to change.
        ConfigError: If two requests have the same id.
    """
    if len({request.request_id for request in requests}) != len(requests):
        raise ConfigError("two sampling requests share a request_id: give each request its own id.")
    for request in requests:
        tokens, max_tokens = request.prompt_tokens, request.sampling.max_tokens
        problem = None
        if not tokens or max(tokens) >= vocab_size or min(tokens) < 0:
            problem = (
                f"has the prompt {tokens!s:.80}, but a prompt needs at least one token and ids "
                f"from 0 to {vocab_size - 1}: check that data.tokenizer.path belongs to the model."
            )
        elif len(tokens) + max_tokens > max_length:
            problem = (
                f"needs {len(tokens) + max_tokens} positions (a prompt of {len(tokens)} tokens and "
                f"sampling.max_tokens = {max_tokens}), but {limit} lower data.max_prompt_tokens or "
                "sampling.max_tokens."
            )
        if problem is not None:
            raise RefusedRequestError(f"request {request.request_id} {problem}", request.request_id)


class ReplicaError(TemperError, RuntimeError):
    """A replica died, did not start, or is stuck; the message names it and ends with its log."""


class Replica(Protocol):
    """One server. After a ReplicaError it is dead until it is started again."""

    @property
    def name(self) -> str:
        """Name for messages, such as "rollout replica 1"."""
        ...

    @property
    def can_restart(self) -> bool:
        """False for a server that the run has not started; if it dies, the sampler drops it."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of vllm, torch and transformers in its environment; empty before `start`."""
        ...

    def start(self) -> None:
        """Start the server, again if it is dead, and wait until its model is built.

        Raises:
            ReplicaError: If it does not start.
        """
        ...

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Return completions in request order; interrupted ones may have no tokens.

        If the future can be cancelled, that aborts the requests. It takes effect before any method
        that is called later.
        """
        ...

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """Call a method of the server's engine."""
        ...

    def close(self) -> None:
        """End the server. Idempotent."""
        ...
