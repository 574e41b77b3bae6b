"""A sampler that says what it is told to: an honest fake for the tests of rooms that need completions."""

from collections.abc import Callable, Iterable, Sequence

from temper_engine_api.errors import ConfigError
from temper_engine_api.weights import NamedWeight
from temper_trainer.types import Completion, FinishReason, SamplingRequest

Script = Callable[[SamplingRequest], Sequence[int]]
"""Tokens that complete a request; deterministic."""


class ScriptedSampler:
    """Completes every request with its script's tokens, each at one constant log-prob, and keeps the weights it was given."""

    def __init__(self, script: Script, *, end_token_id: int, logprob: float = -1.0) -> None:
        self._script = script
        self._end_token_id = end_token_id
        self._logprob = logprob
        self._version = 0
        self.weights: dict[str, NamedWeight] = {}
        """The last set that was loaded, by name."""

    @property
    def weight_version(self) -> int:
        """Of the last load; 0 before."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """The script's tokens, cut at max_tokens as a real sampler would."""
        return [self._complete(request) for request in requests]

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Keep the weights as they come."""
        self.weights = {weight.name: weight for weight in stream}
        self._version = version

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """The constant for every token but the first of each sequence, whatever the temperature."""
        return [[self._logprob] * (len(sequence) - 1) for sequence in tokens]

    def close(self) -> None:
        """Forget the weights."""
        self.weights = {}

    def _complete(self, request: SamplingRequest) -> Completion:
        tokens = tuple(self._script(request))[: request.sampling.max_tokens]
        if not tokens:
            raise ConfigError(
                f"the script gave no tokens for request {request.request_id}: a completion has at least one."
            )
        ended = tokens[-1] == self._end_token_id
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            rollout_logprobs=(self._logprob,) * len(tokens),
            finish_reason=FinishReason.END_TOKEN if ended else FinishReason.MAX_TOKENS,
            weight_version=self._version,
        )
