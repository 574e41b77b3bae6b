"""A sampler whose open completions are paused for a weight sync and resumed with the new weights.

Each token keeps the version of the weights that sampled it and its log-prob under them. The prefix
of a resumed completion is computed again, so no KV cache of old weights is used.
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
"""Interrupts are repeated: one may come before the sampler has received a request."""
SEED_INCREMENT = 0x9E3779B97F4A7C15
"""Odd, with irregular bits: a resumed completion shares no random number with its beginning."""


class SamplingCancelledError(TemperError, RuntimeError):
    """Sampling was cancelled because the run ends."""


@dataclass(slots=True)
class _PartialCompletion:
    """The tokens of a request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, completion: Completion) -> None:
        self.tokens += completion.tokens
        self.logprobs += completion.rollout_logprobs
        self.versions += [completion.weight_version] * len(completion.tokens)


class PausableSampler:
    """A Sampler for several threads whose weights can change while requests are open."""

    def __init__(self, inner: InterruptibleSampler, *, interrupts: bool) -> None:
        """Wrap a sampler.

        Args:
            inner: The sampler that does the work.
            interrupts: True if `pause` interrupts open requests; False if it waits for them.
        """
        self._sampler = inner
        self._interrupts = interrupts
        self._condition = threading.Condition()
        self._is_open = True
        self._num_active = 0
        """Threads that are inside the inner sampler."""
        self._is_cancelled = False
        self.num_resumed = 0
        """Number of interrupted completions that were resumed."""

    @property
    def weight_version(self) -> int:
        """Version of the inner sampler's weights."""
        return self._sampler.weight_version

    @property
    def is_concurrent(self) -> bool:
        """True if the inner sampler is concurrent; see Sampler."""
        return self._sampler.is_concurrent

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one finished completion per request, in their order."""
        partial = {request.request_id: _PartialCompletion() for request in requests}
        finished: dict[int, Completion] = {}
        pending = list(requests)
        while pending:
            with self._enter():
                completions = self._sampler.sample(pending)
            if self._is_cancelled:
                raise SamplingCancelledError("sampling was cancelled, because the run ends.")
            resumed = []
            for request, completion in zip(pending, completions, strict=True):
                if completion.finish_reason != FinishReason.INTERRUPTED:
                    finished[request.request_id] = _join(partial[request.request_id], completion)
                elif request.sampling.stop:
                    # The sampler looks for stop texts only in the tokens of one call, and a stop
                    # text may span the interruption: start again.
                    resumed.append(request)
                else:
                    partial[request.request_id].append(completion)
                    resumed.append(_make_continuation(request, completion))
            self.num_resumed += len(resumed)
            pending = resumed
        return [finished[request.request_id] for request in requests]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Sample nothing while the body runs; resume afterwards."""
        with self._condition:
            self._is_open = False
        try:
            self._wait_until_idle()
            yield
        finally:
            with self._condition:
                self._is_open = True
                self._condition.notify_all()

    def cancel(self) -> None:
        """Make every open `sample` call raise SamplingCancelledError in its thread."""
        self._is_cancelled = True
        try:
            self._sampler.interrupt()
        except TemperError as error:
            # The sampler's completions are no longer needed, so its error does not matter.
            logger.debug("a cancelled sampler could not be interrupted: %s", error)

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Call the inner sampler; only while paused, or if no other thread samples."""
        return self._sampler.logprobs(tokens, temperature=temperature)

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load weights into the inner sampler; only while paused."""
        self._sampler.load_weights(stream, version=version)

    def close(self) -> None:
        """Close the inner sampler."""
        self._sampler.close()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        """Wait until sampling is not paused, and count this thread as active in the body."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_open)
            self._num_active += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_active -= 1
                self._condition.notify_all()

    def _wait_until_idle(self) -> None:
        while True:
            with self._condition:
                if self._num_active == 0:
                    return
            # Interrupt without the lock, which active threads need to leave.
            if self._interrupts:
                self._sampler.interrupt()
            with self._condition:
                is_idle = self._condition.wait_for(
                    lambda: self._num_active == 0, timeout=_INTERRUPT_INTERVAL_S
                )
                if is_idle:
                    return


def _make_continuation(request: SamplingRequest, completion: Completion) -> SamplingRequest:
    """Return a request for the rest of a completion."""
    sampling = replace(
        request.sampling, max_tokens=request.sampling.max_tokens - len(completion.tokens)
    )
    # A new seed, because random numbers depend on the seed and the position in the completion, and
    # positions of the continuation start at 0.
    seed = (request.seed + SEED_INCREMENT * len(completion.tokens)) % 2**63
    # The session of the first part, so that the same replica continues.
    session = hash(request.prompt_tokens) if request.session is None else request.session
    return replace(
        request,
        prompt_tokens=request.prompt_tokens + completion.tokens,
        sampling=sampling,
        seed=seed,
        session=session,
    )


def _join(partial: _PartialCompletion, last: Completion) -> Completion:
    """Return the full completion after its last part."""
    partial.append(last)
    has_several_versions = len(set(partial.versions)) > 1
    return replace(
        last,
        tokens=tuple(partial.tokens),
        rollout_logprobs=tuple(partial.logprobs),
        # The oldest one, because the limit of staleness must hold for every token.
        weight_version=min(partial.versions),
        token_versions=tuple(partial.versions) if has_several_versions else (),
    )
