"""Completions that go on across a weight sync: stopped with what they have, taken up again under the new weights, joined at the end.

Every token keeps the version of the weights that drew it, and its log-prob under them: the beginning is computed anew, so nothing of the
old weights' memory is used.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from temper_engine_api.errors import TemperError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.sampler import InterruptibleSampler
from temper_trainer.types import Completion, FinishReason, SamplingRequest

logger = logging.getLogger(__name__)

_INTERRUPT_INTERVAL_S = 0.5
"""An interrupt may come before the sampler has seen a request; so it is repeated."""
SEED_INCREMENT = 0x9E3779B97F4A7C15
"""Odd and irregular: the seed of a continuation shares no draw with that of its beginning."""


class SamplingCancelledError(TemperError, RuntimeError):
    """Nobody waits for these completions any more."""


@dataclass(slots=True)
class _PartialCompletion:
    """What a request has so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class PausableSampler:
    """A Sampler for several threads, whose weights may be changed while requests are open."""

    def __init__(self, inner: InterruptibleSampler, *, interrupts: bool) -> None:
        """Wrap a sampler.

        Args:
            inner: does the work.
            interrupts: whether a pause stops open requests; False waits until they are done.
        """
        self._inner = inner
        self._interrupts = interrupts
        self._gate = threading.Condition()
        self._is_open = True
        self._num_inside = 0
        self._is_given_up = False
        self.num_resumed = 0
        """Requests that were taken up again."""

    @property
    def weight_version(self) -> int:
        """Of the inner sampler."""
        return self._inner.weight_version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One whole completion per request, in their order."""
        parts = {request.request_id: _PartialCompletion() for request in requests}
        found: dict[int, Completion] = {}
        waiting = list(requests)
        while waiting:
            with self._inside():
                completions = self._inner.sample(waiting)
            if self._is_given_up:
                raise SamplingCancelledError("sampling was given up, because the run ends.")
            again = []
            for request, completion in zip(waiting, completions, strict=True):
                have = parts[request.request_id]
                if completion.finish_reason != FinishReason.INTERRUPTED:
                    found[request.request_id] = _join(have, completion)
                elif request.sampling.stop:
                    again.append(request)  # a stop text may stand across the cut: begin anew
                else:
                    _append(have, completion)
                    again.append(_make_continuation(request, completion))
            self.num_resumed += len(again)
            waiting = again
        return [found[request.request_id] for request in requests]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is being sampled in the body, and nothing begins; afterwards everything goes on."""
        with self._gate:
            self._is_open = False
        try:
            self._drain()
            yield
        finally:
            with self._gate:
                self._is_open = True
                self._gate.notify_all()

    def cancel(self) -> None:
        """End every open call, in its own thread, with an error: nothing more is wanted."""
        self._is_given_up = True
        try:
            self._inner.interrupt()
        except TemperError as error:
            logger.debug("a sampler that is not wanted any more: %s", error)

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """As the inner sampler; to be called while paused, or where nothing else samples."""
        return self._inner.logprobs(tokens, temperature=temperature)

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """As the inner sampler."""
        self._inner.load_weights(stream, version=version)

    def close(self) -> None:
        """As the inner sampler."""
        self._inner.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._gate:
            self._gate.wait_for(lambda: self._is_open)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._gate:
                self._num_inside -= 1
                self._gate.notify_all()

    def _drain(self) -> None:
        while True:
            with self._gate:
                if self._num_inside == 0:
                    return
            if self._interrupts:
                self._inner.interrupt()
            with self._gate:
                if self._gate.wait_for(
                    lambda: self._num_inside == 0, timeout=_INTERRUPT_INTERVAL_S
                ):
                    return


def _append(parts: _PartialCompletion, completion: Completion) -> None:
    parts.tokens += completion.tokens
    parts.logprobs += completion.rollout_logprobs
    parts.versions += [completion.weight_version] * len(completion.tokens)


def _make_continuation(request: SamplingRequest, completion: Completion) -> SamplingRequest:
    """What is left to ask, with a seed of its own: draws count from the request's first token."""
    sampling = replace(
        request.sampling, max_tokens=request.sampling.max_tokens - len(completion.tokens)
    )
    seed = (request.seed + SEED_INCREMENT * len(completion.tokens)) % 2**63
    session = hash(request.prompt_tokens) if request.session is None else request.session
    return replace(
        request,
        prompt_tokens=request.prompt_tokens + completion.tokens,
        sampling=sampling,
        seed=seed,
        session=session,
    )


def _join(parts: _PartialCompletion, last: Completion) -> Completion:
    _append(parts, last)
    is_mixed = len(set(parts.versions)) > 1
    return replace(
        last,
        tokens=tuple(parts.tokens),
        rollout_logprobs=tuple(parts.logprobs),
        weight_version=min(parts.versions),
        token_versions=tuple(parts.versions) if is_mixed else (),
    )
