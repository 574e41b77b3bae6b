"""Samplers for tests and benchmarks, whose tokens come from a function instead of a model."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from temper_engine_api.weights import NamedWeight
from temper_trainer.types import Completion, FinishReason, RefusedRequestError, SamplingRequest

Script = Callable[[SamplingRequest], Sequence[int]]
"""Returns the tokens that complete a request. Must be deterministic."""


class ScriptedSampler:
    """Completes requests with a script's tokens at a constant log-prob, and stores weights."""

    def __init__(self, script: Script, *, end_token_id: int, logprob: float = -1.0) -> None:
        self._script = script
        self._end_token_id = end_token_id
        self._logprob = logprob
        self._version = 0
        self.weights: dict[str, NamedWeight] = {}
        """The weights that were loaded last, by name."""

    @property
    def weight_version(self) -> int:
        """Version of the last load; 0 before it."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return the script's tokens, truncated to `max_tokens`."""
        return [self._complete(request) for request in requests]

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Store the weights."""
        self.weights = {weight.name: weight for weight in stream}
        self._version = version

    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the constant for every token but the first."""
        return [[self._logprob] * (len(sequence) - 1) for sequence in tokens]

    def close(self) -> None:
        """Drop the weights."""
        self.weights = {}

    def _complete(self, request: SamplingRequest, *, num_tokens: int | None = None) -> Completion:
        """Return the completion of a request, interrupted after `num_tokens` tokens if given."""
        tokens = tuple(self._script(request))[: request.sampling.max_tokens]
        if not tokens:
            raise RefusedRequestError(
                f"request {request.request_id} has a script without tokens: return at least one.",
                request.request_id,
            )
        is_interrupted = num_tokens is not None and num_tokens < len(tokens)
        tokens = tokens[:num_tokens]
        if is_interrupted:
            reason = FinishReason.INTERRUPTED
        elif tokens[-1] == self._end_token_id:
            reason = FinishReason.END_TOKEN
        else:
            reason = FinishReason.MAX_TOKENS
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            rollout_logprobs=(self._logprob,) * len(tokens),
            finish_reason=reason,
            weight_version=self._version,
        )


class ScriptedServer(ScriptedSampler):
    """A StreamingSampler with a number of slots, which takes the same time for every token."""

    def __init__(
        self, script: Script, *, end_token_id: int, token_s: float, max_concurrent: int
    ) -> None:
        """Create a server without open requests.

        Args:
            script: As for ScriptedSampler. A request that continues an interrupted completion has
                the tokens so far in its prompt.
            end_token_id: Token that ends a completion.
            token_s: Time per token in a sequence, in seconds; 0 answers at once.
            max_concurrent: Number of sequences that it decodes at the same time.
        """
        super().__init__(script, end_token_id=end_token_id)
        self._token_s = token_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._open: set[asyncio.Future[bool]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_interrupted = False

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        """Return the completion after the time of its tokens, or earlier if it is interrupted."""
        self._loop = asyncio.get_running_loop()
        if on_server is not None:
            on_server(0)
        async with self._slots:
            if self._is_interrupted:
                return self._complete(request, num_tokens=0)
            complete = self._complete(request)
            if self._token_s == 0:
                return complete
            start = time.perf_counter()
            stopped: asyncio.Future[bool] = self._loop.create_future()
            self._open.add(stopped)
            seconds = self._token_s * len(complete.tokens)
            done = self._loop.call_later(seconds, _settle, stopped, False)
            try:
                is_interrupted = await stopped
            finally:
                done.cancel()
                self._open.discard(stopped)
            if is_interrupted:
                seconds = time.perf_counter() - start
                return self._complete(request, num_tokens=int(seconds / self._token_s))
            return complete

    def interrupt(self) -> None:
        """Interrupt all open requests; see InterruptibleSampler."""
        self._is_interrupted = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_open)

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Store the weights, and sample again."""
        super().load_weights(stream, version=version)
        self._is_interrupted = False

    def _stop_open(self) -> None:
        for future in list(self._open):
            _settle(future, True)


def _settle(future: "asyncio.Future[bool]", is_interrupted: bool) -> None:
    if not future.done():
        future.set_result(is_interrupted)
