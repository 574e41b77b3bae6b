"""Rollouts of agents, which request completions themselves.

An agent decides what the policy reads. If a request begins with the tokens of an earlier request
and its completion, both completions are joined, so that a conversation is one sample. Where an
agent has changed its history, a branch begins.
"""

import asyncio
import operator
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from temper_trainer.environment.protocol import (
    AgentOutcome,
    InvalidAnswerError,
    RolloutLimitError,
    describe_token_ids,
)
from temper_trainer.loops.rollouts.multi_turn import Conversation, RolloutLimits
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.timeline import RolloutTrace, Span
from temper_trainer.types import Branch, Completion, RefusedRequestError, SamplingRequest, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A completion that an agent has requested."""

    prompt_tokens: tuple[int, ...]
    """Everything that the policy has read."""
    completion: Completion


@dataclass(slots=True, kw_only=True)
class AgentCalls:
    """The requests of one agent."""

    request: SamplingRequest
    """Gives the settings and the seed; its prompt is not read."""
    limits: RolloutLimits
    """Limits of the rollout."""
    sample_request: Callable[[SamplingRequest], Awaitable[Completion]]
    """Samples a completion."""
    discard: Callable[[SamplingRequest], None]
    """Records that the agent has not read the completion of a request."""
    is_concurrent: bool
    """False if the sampler allows one open request per rollout; others then wait."""
    timeout: asyncio.Timeout
    """Limits the time of the agent between its requests."""
    timeout_s: float | None
    """Maximum time between requests in seconds; None is no limit."""
    vocab_size: int | None
    """Number of token ids that the agent may send; None does not check them."""
    finished: list[AgentCall] = field(default_factory=list)
    """Completions that the agent got, in the order in which they were finished."""
    trace: RolloutTrace = field(default_factory=RolloutTrace)
    """Records the time between requests, which is the agent's."""
    is_over_limit: bool = False
    """True if a request was refused because of a limit."""
    sampler_error: Exception | None = None
    """Error of the sampler as a whole, which is not the agent's failure."""
    is_ended: bool = False
    """True when the agent has ended; requests may still be open."""
    _working_since: float = field(default_factory=time.perf_counter)
    """Time at which the last request was answered."""
    num_repeated: int = 0
    """Number of requests that repeat one which the agent had given up."""
    _given_up: list[tuple[SamplingRequest, asyncio.Task[Completion]]] = field(default_factory=list)
    """Requests that the agent gave up, whose completions are still sampled for a repetition."""
    _answered: dict[asyncio.Task[Completion], SamplingRequest] = field(default_factory=dict)
    """Requests whose completions were returned."""
    _num_started: int = 0
    _num_open: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        is_repeated: bool = False,
    ) -> Completion:
        """Return a completion; see `SampleFunction`."""
        ids = self._check_tokens(tokens)
        request, task = self._start(
            self._make_request(ids, max_tokens=max_tokens, stop=stop), is_repeated=is_repeated
        )
        self._record_work()
        self._num_open += 1
        self._set_deadline(None)
        try:
            # Unlike `await task`, this does not cancel the task if this call is cancelled.
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if task not in self._answered:
                self._given_up.append((request, task))
            raise
        finally:
            self._num_open -= 1
            self._working_since = time.perf_counter()
            is_waiting = not self._num_open and self.sampler_error is None
            if is_waiting and self.timeout_s is not None:
                self._set_deadline(asyncio.get_running_loop().time() + self.timeout_s)
        completion = task.result()
        # Not reached if this call was cancelled: the agent has not read the completion then.
        if task not in self._answered:
            self._answered[task] = request
            self.finished.append(
                AgentCall(prompt_tokens=request.prompt_tokens, completion=completion)
            )
        return completion

    async def end(self) -> None:
        """Record that the agent has ended, and cancel the requests that it has given up."""
        self._record_work()
        self._set_deadline(None)
        self.is_ended = True
        for _, task in self._given_up:
            task.cancel()
        # Wait for their end. Otherwise the timing of the cancellation would change what the sampler
        # does next.
        await asyncio.gather(*(task for _, task in self._given_up), return_exceptions=True)
        for request, task in self._given_up:
            if not task.cancelled():
                self.discard(request)

    def _start(
        self, request: SamplingRequest, *, is_repeated: bool
    ) -> tuple[SamplingRequest, "asyncio.Task[Completion]"]:
        """Return the task of an equal request that the agent repeats, or start one.

        A client repeats a request after its timeout, which mostly long completions exceed. Sampling
        again would replace them by shorter ones, or exceed the timeout each time.

        Raises:
            RolloutLimitError: See `SampleFunction`.
        """
        for i, (given_up, _) in enumerate(self._given_up):
            if given_up == replace(request, seed=given_up.seed):
                self.num_repeated += 1
                return self._given_up.pop(i)
        for task, answered in reversed(self._answered.items()) if is_repeated else ():
            if answered == replace(request, seed=answered.seed):
                self.num_repeated += 1
                return answered, task
        if self._num_started == self.limits.max_turns:
            self.is_over_limit = True
            raise RolloutLimitError(
                f"this rollout had its {self.limits.max_turns} completions (environment.max_turns)."
            )
        call, self._num_started = self._num_started, self._num_started + 1
        if call > 0:
            request = replace(request, seed=derive_seed(self.request.seed, "turn", call))
        return request, asyncio.create_task(self._sample_to_end(request))

    async def _sample_to_end(self, request: SamplingRequest) -> Completion:
        try:
            async with nullcontext() if self.is_concurrent else self._lock:
                return await self.sample_request(request)
        except RefusedRequestError:
            raise  # the agent may send another request
        except Exception as error:
            self.sampler_error = error
            self._set_deadline(asyncio.get_running_loop().time())
            raise

    def _record_work(self) -> None:
        """Add the time since the last request to the trace, unless one is open."""
        if not self._num_open:
            self.trace.spans.append(Span("environment", self._working_since, time.perf_counter()))

    def _set_deadline(self, deadline: float | None) -> None:
        """Set the time until which the agent must request or end."""
        if not self.is_ended and not self.timeout.expired():
            self.timeout.reschedule(deadline)

    def _check_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids as integers.

        Raises:
            InvalidAnswerError: See `SampleFunction`. Without this check, the sampler would raise,
                which ends the run.
        """
        expected = describe_token_ids(self.vocab_size)
        try:
            ids = tuple(operator.index(token) for token in tokens)
        except TypeError as error:
            raise InvalidAnswerError(
                f"the agent requested a completion of {tokens!r:.100}: send {expected}."
            ) from error
        if not ids:
            raise InvalidAnswerError(
                "the agent requested a completion of no tokens: send at least one."
            )
        unknown = {
            each
            for each in ids
            if each < 0 or (self.vocab_size is not None and each >= self.vocab_size)
        }
        # A model may have more ids than the tokenizer, and sample them.
        if unknown and (
            unknown := unknown.difference(*(each.completion.tokens for each in self.finished))
        ):
            raise InvalidAnswerError(
                f"the agent requested a completion of token {min(unknown)}: send {expected}."
            )
        return ids

    def _make_request(
        self, tokens: tuple[int, ...], *, max_tokens: int | None, stop: Sequence[str]
    ) -> SamplingRequest:
        """Return the request of a completion, with the seed of the first.

        Raises:
            RolloutLimitError: See `SampleFunction`.
        """
        longest = len(self.request.prompt_tokens) + self.limits.max_tokens
        if len(tokens) >= longest:
            self.is_over_limit = True
            raise RolloutLimitError(
                f"the request has {len(tokens)} tokens, but with its completion it may have "
                f"{longest}: the {len(self.request.prompt_tokens)} of the row's prompt and the "
                f"{self.limits.max_tokens} of environment.max_tokens."
            )
        sampling = self.request.sampling
        lengths = [sampling.max_tokens, longest - len(tokens)]
        if max_tokens is not None:
            lengths.append(max_tokens)
        return replace(
            self.request,
            prompt_tokens=tokens,
            sampling=replace(sampling, max_tokens=min(lengths), stop=(*sampling.stop, *stop)),
            # One replica has the beginning of the conversation in its prefix cache.
            session=self.request.seed if self.request.session is None else self.request.session,
        )

    def fill(self, conversation: Conversation, *, outcome: AgentOutcome) -> None:
        """Add the completions and the outcome to a conversation."""
        histories = join_calls(self.finished)
        # The conversation is the history of the last completion, whose text is scored.
        last = next(
            i
            for i, each in enumerate(histories)
            if each.completions[-1] is self.finished[-1].completion
        )
        main = histories.pop(last)
        conversation.request = replace(self.request, prompt_tokens=main.prompt_tokens)
        conversation.first, conversation.turns = main.completion, list(main.turns)
        conversation.branches = tuple(histories)
        conversation.rewards = [*([0.0] * len(main.turns)), outcome.reward]
        conversation.metrics = [
            {
                "agent/requests": float(len(self.finished)),
                "agent/branches": float(len(histories)),
                "agent/repeated_requests": float(self.num_repeated),
                "agent/over_limit": float(self.is_over_limit),
                **outcome.metrics,
            }
        ]


def join_calls(calls: Sequence[AgentCall]) -> list[Branch]:
    """Join calls whose tokens begin with an earlier call and its completion.

    Returns:
        The histories, in the order of their first completions. Each completion is in one of them.

    Example:
        >>> from temper_trainer.types import FinishReason
        >>> def call(prompt, tokens):
        ...     return AgentCall(
        ...         prompt_tokens=prompt,
        ...         completion=Completion(
        ...             request_id=0,
        ...             tokens=tokens,
        ...             rollout_logprobs=(-0.5,) * len(tokens),
        ...             finish_reason=FinishReason.END_TOKEN,
        ...             weight_version=1,
        ...         ),
        ...     )
        >>> calls = [call((1,), (2, 3)), call((1, 2, 3, 4), (5,)), call((1, 9), (6,))]
        >>> histories = join_calls(calls)
        >>> [(each.prompt_tokens, len(each.turns)) for each in histories]
        [((1,), 1), ((1, 9), 0)]
        >>> histories[0].turns[0].observation
        (4,)
    """
    histories: list[Branch] = []
    tokens: list[tuple[int, ...]] = []
    """All tokens of each history."""
    for call in calls:
        prompt = call.prompt_tokens
        # Use the longest match, because one history may begin with all tokens of another.
        best = max(
            (i for i, each in enumerate(tokens) if prompt[: len(each)] == each),
            key=lambda i: len(tokens[i]),
            default=None,
        )
        if best is None:
            histories.append(Branch(prompt_tokens=prompt, completion=call.completion))
            tokens.append((*prompt, *call.completion.tokens))
        else:
            turn = Turn(observation=prompt[len(tokens[best]) :], completion=call.completion)
            histories[best] = replace(histories[best], turns=(*histories[best].turns, turn))
            tokens[best] = (*prompt, *call.completion.tokens)
    return histories
