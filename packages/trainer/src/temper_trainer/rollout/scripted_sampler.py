"""A sampler for tests that completes prompts with tokens from a function instead of a model."""

from collections.abc import Callable, Iterable, Sequence

from temper_engine_api.errors import ConfigError
from temper_engine_api.weights import NamedWeight
from temper_trainer.types import Completion, FinishReason, SamplingRequest

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

    @property
    def is_concurrent(self) -> bool:
        """Always False; see Sampler."""
        return False

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return the script's tokens, truncated to `max_tokens`."""
        return [self._complete(request) for request in requests]

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Store the weights."""
        self.weights = {weight.name: weight for weight in stream}
        self._version = version

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Return the constant for every token but the first."""
        return [[self._logprob] * (len(sequence) - 1) for sequence in tokens]

    def close(self) -> None:
        """Drop the weights."""
        self.weights = {}

    def _complete(self, request: SamplingRequest) -> Completion:
        tokens = tuple(self._script(request))[: request.sampling.max_tokens]
        if not tokens:
            raise ConfigError(
                f"the script returned no tokens for request {request.request_id}: return at least "
                "one."
            )
        ended = tokens[-1] == self._end_token_id
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            rollout_logprobs=(self._logprob,) * len(tokens),
            finish_reason=FinishReason.END_TOKEN if ended else FinishReason.MAX_TOKENS,
            weight_version=self._version,
        )
