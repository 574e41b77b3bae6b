"""Sample single requests in an event loop, from samplers that block and from servers.

`AsyncSampler` can be paused for a weight sync: open completions stop and continue with the new
weights, or the sync waits for them. Each token keeps its weight version and its log-prob under
these weights. A continued completion's prefix is computed again, so no KV cache from old weights is
used.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from temper_trainer.concurrency import DaemonThreads, PriorityLimit
from temper_trainer.metrics.timeline import OccupancyGauge, RolloutTrace
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.rollout.sampler import (
    InterruptibleSampler,
    Sampler,
    StreamingSampler,
)
from temper_trainer.rollout.stop_texts import cut_continuation
from temper_trainer.types import (
    Completion,
    FinishReason,
    RefusedRequestError,
    SamplingRequest,
    pack_completion,
)

_INTERRUPT_INTERVAL_S = 0.5
"""Interrupts are repeated: one may come before the sampler has received a request."""
SEED_INCREMENT = 0x9E3779B97F4A7C15
"""Odd, with irregular bits: a resumed completion shares no random number with its beginning."""


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


@dataclass(slots=True)
class Cohort:
    """Rollouts that a sampler without streaming samples together, one call after another.

    A call starts when every open rollout of the cohort waits for a completion. Its requests then
    depend on the rollouts and not on which environment answered first. The same is true for the
    sampler's batches and their rounding.
    """

    num_open: int
    """Rollouts that may still request completions."""
    priority: int = 0
    """Cohorts with smaller numbers are sampled first."""
    on_start: Callable[[int], None] | None = None
    """Called with the index of a rollout whose request reaches the sampler."""
    waiting: "dict[int, _Waiting]" = field(default_factory=dict)
    """Requests for the next call, by rollout index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A request that waits for its cohort's next call."""

    request: SamplingRequest
    future: "asyncio.Future[Completion]"
    trace: RolloutTrace


class AsyncSampler:
    """Samples single requests. Its methods run in one event loop, unless stated otherwise."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        max_concurrent: int | None = None,
        interrupts: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        recorder: CompletionRecorder | None = None,
        replay: CompletionReplay | None = None,
    ) -> None:
        """Wrap a sampler.

        Args:
            sampler: The sampler that does the work.
            max_concurrent: Maximum number of requests at a streaming sampler; None has no limit.
            interrupts: True if `pause` interrupts open requests; False if it waits for them.
            tokenizer: Decodes interrupted completions, to find a stop text that begins before an
                interruption and ends after it. None if requests have no stop texts, or none is
                interrupted.
            recorder: Records finished completions.
            replay: Returns recorded completions, so that nothing is sampled.
        """
        self._recorder = recorder
        self._replay = replay
        self._sampler = sampler
        self._streaming = sampler if isinstance(sampler, StreamingSampler) else None
        self._interrupts = interrupts
        self._tokenizer = tokenizer
        # A sampler without streaming allows one call at a time.
        self._limit = PriorityLimit(max_concurrent if self._streaming else 1)
        self._threads = DaemonThreads("sampling")
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_active = 0
        """Calls that are inside the inner sampler."""
        self._calls: set[asyncio.Task[None]] = set()
        self.occupancy = OccupancyGauge()
        """Counts the open requests of each server; a sampler without streaming is server 0."""
        self.num_resumed = 0
        """Number of interrupted completions that were resumed."""

    async def sample(
        self,
        request: SamplingRequest,
        *,
        cohort: Cohort,
        index: int = 0,
        trace: RolloutTrace | None = None,
    ) -> Completion:
        """Return a finished completion.

        Args:
            request: What to complete.
            cohort: Cohort of the rollout.
            index: Index of the rollout in its cohort.
            trace: Records when the request is sampled.

        Raises:
            RefusedRequestError: If the sampler refuses the request.
        """
        if self._replay is not None:
            if self._replay.is_cancelled(request):
                # Wait until the caller cancels this request, as it did in the recorded run.
                await asyncio.Event().wait()
            return self._replay.find(request)
        try:
            completion = pack_completion(
                await self._sample_to_end(
                    request, cohort=cohort, index=index, trace=trace or RolloutTrace()
                )
            )
        except RefusedRequestError as error:
            if self._recorder is not None:
                self._recorder.add_refusal(request, error)
            raise
        except asyncio.CancelledError:
            self.discard(request)
            raise
        if self._recorder is not None:
            self._recorder.add(request, completion)
        return completion

    def discard(self, request: SamplingRequest) -> None:
        """Record that the caller has not read the completion of a request."""
        if self._recorder is not None:
            self._recorder.add_cancellation(request)

    async def _sample_to_end(
        self, request: SamplingRequest, *, cohort: Cohort, index: int, trace: RolloutTrace
    ) -> Completion:
        """Sample a completion, and continue it after each interruption.

        An interrupted completion is never started again. Mostly long completions are interrupted,
        so drawing them again would make the trained completions shorter on average.
        """
        partial, current = _PartialCompletion(), request
        while True:
            if self._streaming is None:
                completion = await self._sample_with_cohort(
                    current, cohort=cohort, index=index, trace=trace
                )
            else:
                async with self._limit.acquire((cohort.priority, index)), self._count_active():
                    if cohort.on_start is not None:
                        cohort.on_start(index)
                    completion = await self._sample_one(self._streaming, current, trace=trace)
            if request.sampling.stop and partial.tokens:
                assert self._tokenizer is not None, "needed to continue requests with stop texts"
                completion = cut_continuation(
                    completion,
                    before=partial.tokens,
                    stop=request.sampling.stop,
                    tokenizer=self._tokenizer,
                )
            if completion.finish_reason != FinishReason.INTERRUPTED:
                return _join(partial, completion)
            self.num_resumed += 1
            partial.append(completion)
            current = _make_continuation(current, completion)

    async def _sample_one(
        self, streaming: StreamingSampler, request: SamplingRequest, *, trace: RolloutTrace
    ) -> Completion:
        with trace.measure_from("sampling") as begin, self.occupancy.count() as move:

            def on_server(number: int) -> None:
                # Waiting for a server is no sampling: all may have died or be loading weights.
                begin()
                move(number)

            return await streaming.sample_one(request, on_server=on_server)

    @property
    def is_streaming(self) -> bool:
        """True if requests of one rollout may be open at the same time."""
        return self._streaming is not None or self._replay is not None

    def join(self, cohort: Cohort) -> None:
        """Record that a rollout that has left its cohort may request completions again."""
        cohort.num_open += 1

    def leave(self, cohort: Cohort) -> None:
        """Record that a rollout of the cohort requests no more completions."""
        cohort.num_open -= 1
        self._start_call_if_complete(cohort)

    async def pause(self) -> None:
        """Return when no request is being sampled; none starts until `resume`."""
        self._open.clear()
        while self.num_active:
            # Repeated: an interrupt may come before the sampler has received a request.
            if self._interrupts:
                assert isinstance(self._sampler, InterruptibleSampler)
                await self._threads.call(self._sampler.interrupt)
            try:
                await asyncio.wait_for(self._idle.wait(), timeout=_INTERRUPT_INTERVAL_S)
            except TimeoutError:
                continue

    def resume(self) -> None:
        """Sample again, usually with new weights."""
        self._open.set()

    def interrupt(self) -> None:
        """Let open calls of the inner sampler return soon, if it can; from any thread."""
        if isinstance(self._sampler, InterruptibleSampler) and self.num_active:
            # Not waited for: the call of a dead server may take long.
            self._threads.start(self._sampler.interrupt)

    def close(self, *, timeout_s: float) -> None:
        """End the threads, and wait this long for the calls in them; from any thread."""
        self._threads.close(timeout_s=timeout_s)

    async def _sample_with_cohort(
        self, request: SamplingRequest, *, cohort: Cohort, index: int, trace: RolloutTrace
    ) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request=request, future=future, trace=trace)
        cohort.waiting[index] = waiting
        self._start_call_if_complete(cohort)
        try:
            return await future
        finally:
            # Its rollout may have given the request up, and still be open.
            if cohort.waiting.get(index) is waiting:
                del cohort.waiting[index]

    def _start_call_if_complete(self, cohort: Cohort) -> None:
        if not cohort.waiting or len(cohort.waiting) < cohort.num_open:
            return
        # In the order of the rollouts, because the sampler's batches depend on it.
        indices = sorted(cohort.waiting)
        waiting = [cohort.waiting[index] for index in indices]
        cohort.waiting = {}
        task = asyncio.create_task(self._sample_together(waiting, indices=indices, cohort=cohort))
        # The loop has only weak references to tasks.
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _sample_together(
        self,
        waiting: Sequence[_Waiting],
        *,
        indices: Sequence[int],
        cohort: Cohort,
    ) -> None:
        """Sample requests in one call and complete their futures."""
        requests = [each.request for each in waiting]
        try:
            async with self._limit.acquire((cohort.priority, 0)), self._count_active():
                if cohort.on_start is not None:
                    for index in indices:
                        cohort.on_start(index)
                with ExitStack() as stack:
                    for each in waiting:
                        stack.enter_context(each.trace.measure("sampling"))
                    stack.enter_context(self.occupancy.count(len(requests)))(0)
                    results = await self._call_sampler(requests)
        except BaseException as error:
            for each in waiting:
                if not each.future.done():
                    each.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for each, result in zip(waiting, results, strict=True):
            if each.future.done():  # its rollout may have been cancelled
                continue
            if isinstance(result, RefusedRequestError):
                each.future.set_exception(result)
            else:
                each.future.set_result(result)

    async def _call_sampler(
        self, requests: Sequence[SamplingRequest]
    ) -> list[Completion | RefusedRequestError]:
        """Return the completion of each request, or the error if the sampler refuses it."""
        refused: dict[int | None, RefusedRequestError] = {}
        while True:
            accepted = [i for i, each in enumerate(requests) if each.request_id not in refused]
            try:
                completions = await self._threads.call(
                    self._sampler.sample, [requests[i] for i in accepted]
                )
            except RefusedRequestError as error:
                if error.request_id not in {requests[i].request_id for i in accepted}:
                    raise
                refused[error.request_id] = error
            else:
                completed = dict(zip(accepted, completions, strict=True))
                return [
                    completed[i] if i in completed else refused[each.request_id]
                    for i, each in enumerate(requests)
                ]

    @asynccontextmanager
    async def _count_active(self) -> AsyncIterator[None]:
        """Wait until sampling is not paused, and count a call during the body."""
        while not self._open.is_set():
            await self._open.wait()
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self._idle.set()


def _make_continuation(request: SamplingRequest, completion: Completion) -> SamplingRequest:
    """Return a request that continues a completion."""
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
        prompt_tokens=(*request.prompt_tokens, *completion.tokens),
        sampling=sampling,
        seed=seed,
        session=session,
    )


def _join(partial: _PartialCompletion, last: Completion) -> Completion:
    """Return the full completion after its last part."""
    if not partial.tokens:
        return last
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
