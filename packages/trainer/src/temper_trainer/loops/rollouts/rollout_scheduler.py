"""Run each rollout as a task of one event loop: sample, let its environment answer, score.

Rollouts wait for each other only when a limit or the sampler requires it. Sampling, environments
and rewards have separate limits. A rollout that waits for one limit uses no thread and does not
count towards the others. Earlier rollouts continue first.

The event loop runs in a thread. The main thread starts coroutines in it, waits for them, and pauses
sampling while it publishes weights.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import TemperError
from temper_trainer.concurrency import DaemonThreads, PriorityLimit, convert_exits, gather_or_cancel
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.protocol import (
    AgentEnvironment,
    AgentOutcome,
    Environment,
    EnvironmentFactory,
    InvalidAnswerError,
    Observation,
    check_answer,
)
from temper_trainer.loops.rollouts.agent_rollouts import AgentCalls
from temper_trainer.loops.rollouts.multi_turn import (
    Conversation,
    RolloutLimits,
    add_observation,
    add_opening,
    make_turn_request,
    measure_turns,
)
from temper_trainer.metrics.timeline import OccupancyGauge, RolloutTrace, Span
from temper_trainer.rollout.async_sampler import AsyncSampler, Cohort
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.types import Completion, Prompt, RefusedRequestError, SamplingRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Argument = TypeVar("Argument")

Finish = Callable[[int, Conversation], Awaitable[object]]
"""Called with a rollout's index and conversation when it ends."""

CLOSE_TIMEOUT_S = 60.0
"""Maximum time to wait for open sampler calls when the run ends, for calls that ignore the
interrupt."""
CANCEL_TIMEOUT_S = 10.0
"""Time for cancelled coroutines to end, such as one that closes the connection to a server."""


class EnvironmentTimeoutError(TemperError, RuntimeError):
    """An environment did not answer in time."""


class IdleAgentError(TemperError, RuntimeError):
    """An agent ended without a completion."""


class RolloutFailureError(TemperError, RuntimeError):
    """So many rollouts failed that training on the others would be misleading."""


NamedEnvironment = tuple[EnvironmentConfig, EnvironmentFactory]
"""Configuration and factory of the environments with one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPool:
    """Environments with the same settings, and the limits that they share."""

    config: EnvironmentConfig
    make: EnvironmentFactory
    open_limit: PriorityLimit
    """Limit of environments that are open."""
    limit: PriorityLimit
    """Limit of calls, and of agents that run."""
    constructor_limit: PriorityLimit
    """Limit of constructors. Not the same one, because agents that run may wait for a rollout whose
    environment is not constructed yet."""

    @classmethod
    def create(cls, config: EnvironmentConfig, make: EnvironmentFactory) -> "EnvironmentPool":
        """Return a pool with the limits of a configuration."""
        return cls(
            config=config,
            make=make,
            open_limit=PriorityLimit(config.max_open),
            limit=PriorityLimit(config.max_concurrent),
            constructor_limit=PriorityLimit(config.max_concurrent),
        )


class RolloutScheduler:
    """Runs the rollouts of a run; a context manager, because it has threads."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        environment: EnvironmentConfig | None = None,
        make_environment: EnvironmentFactory | None = None,
        named_environments: Mapping[str, NamedEnvironment] | None = None,
        max_failure_fraction: float = 0.0,
        max_sampling: int | None = None,
        interrupts: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        recorder: CompletionRecorder | None = None,
        replay: CompletionReplay | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Start the event loop.

        Args:
            sampler: Samples completions.
            environment: Configuration of the environments; None for single-turn rollouts.
            make_environment: Makes the environment of a rollout; None for single-turn rollouts.
            named_environments: Configuration and factory of other environments, by the name in
                `Prompt.environment`.
            max_failure_fraction: Limit for rollouts without an environment: the maximum fraction of
                them that may fail. Environments have a limit in their configuration.
            max_sampling: Maximum number of open requests to a streaming sampler. Other requests
                wait in the scheduler and later start with newer weights.
            interrupts: Interrupt open requests in a pause; False waits for them.
            tokenizer: Decodes interrupted completions, to find a stop text that begins before an
                interruption and ends after it; see `AsyncSampler`.
            recorder: Records completions; closed with the scheduler.
            replay: Returns recorded completions instead of sampling.
            vocab_size: Number of token ids that environments and agents may use; None does not
                check them.
        """
        self._vocab_size = vocab_size
        self._max_failure_fraction = max_failure_fraction
        self._pools = {
            name: EnvironmentPool.create(config, make)
            for name, (config, make) in (named_environments or {}).items()
        }
        if environment is not None and make_environment is not None:
            self._pools[""] = EnvironmentPool.create(environment, make_environment)
        self.recorder = recorder
        """Records completions; None if they are not recorded."""
        self.replay = replay
        """Completions of an earlier run; None if they are sampled."""
        self._sampler = AsyncSampler(
            sampler,
            max_concurrent=max_sampling,
            interrupts=interrupts,
            tokenizer=tokenizer,
            recorder=recorder,
            replay=replay,
        )
        self._environment_threads = DaemonThreads("environment")
        self._loop = asyncio.new_event_loop()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name="rollouts")
        self._thread.start()

    def __enter__(self) -> "RolloutScheduler":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_resumed(self) -> int:
        """Number of completions that were interrupted by a pause and continued."""
        return self._sampler.num_resumed

    @property
    def occupancy(self) -> OccupancyGauge:
        """Counts the open requests of each server."""
        return self._sampler.occupancy

    def start(self, coroutine: Coroutine[object, object, T]) -> "Future[T]":
        """Start a coroutine in the event loop; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine to its end; from any other thread."""
        return self.wait(self.start(coroutine))

    def wait(self, future: "Future[T]") -> T:
        """Return the result of a started coroutine; cancel all if this thread is interrupted."""
        try:
            return future.result()
        except Exception:
            raise
        except BaseException:
            # The run is being stopped. Nothing needs the rollouts, and the save needs the cores.
            self.cancel()
            raise

    @contextmanager
    def pause_sampling(self) -> Iterator[None]:
        """Pause all sampling during the body."""
        self.run(self._sampler.pause())
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._sampler.resume)

    def cancel(self) -> None:
        """Cancel all coroutines, and interrupt open calls of the sampler."""
        self._sampler.interrupt()
        self._loop.call_soon_threadsafe(self._cancel_tasks)

    def close(self) -> None:
        """Cancel what is in progress and end the threads. Idempotent."""
        if self._loop.is_closed():
            return
        self.cancel()
        self._close_factories()
        self._loop.call_soon_threadsafe(self._stop_loop)
        self._thread.join()
        self._sampler.close(timeout_s=CLOSE_TIMEOUT_S)
        # Not waited for: a tool that hangs must not keep the run from ending.
        self._environment_threads.close()
        self._loop.close()
        if self.recorder is not None:
            self.recorder.close()

    def _close_factories(self) -> None:
        """End what the environments share, such as a server."""
        for pool in self._pools.values():
            close = getattr(pool.make, "close", None)
            if close is not None:
                try:
                    self.start(close()).result(timeout=CLOSE_TIMEOUT_S)
                except TimeoutError:
                    # Only warn, so that a finished run can end.
                    logger.warning(
                        "%s did not end within %g s.", type(pool.make).__name__, CLOSE_TIMEOUT_S
                    )

    async def run_rollouts(
        self,
        requests: Sequence[SamplingRequest],
        *,
        prompts: Sequence[Prompt],
        priority: int = 0,
        given: Mapping[int, Conversation] | None = None,
        on_start: Callable[[int], None] | None = None,
        finish: Finish | None = None,
    ) -> tuple[list[Conversation], dict[str, float]]:
        """Run every rollout to its end: one completion without an environment, else several turns.

        Args:
            requests: The first request of each rollout; seeds of later turns are derived from it.
            prompts: The prompt of each request.
            priority: Rollouts with a smaller number continue first.
            given: Rollouts that need not be sampled, by their indices.
            on_start: Called with the index of each request that reaches the sampler, and at once
                with those of `given`.
            finish: Called with index and conversation when a rollout ends, for example to score it.
                Other rollouts continue meanwhile.

        Returns:
            Conversations in the order of the requests, and metrics of turns and tools. A
            conversation whose environment failed, or of which the sampler refused a request, has a
            `failure`.

        Raises:
            RolloutFailureError: If a larger fraction failed than
                environment.max_failure_fraction, or without an environment than
                rollout.max_failure_fraction. If the fraction is 0, the error of the first.
        """
        if not requests:
            return [], {}
        rollouts = _Round(
            requests,
            prompts=prompts,
            priority=priority,
            sampler=self._sampler,
            pools=self._pools,
            threads=self._environment_threads,
            max_failure_fraction=self._max_failure_fraction,
            vocab_size=self._vocab_size,
            given=given or {},
            on_start=on_start,
        )

        if on_start is not None:
            # Given completions count as sampled now, however long their scoring takes.
            for index in rollouts.given:
                on_start(index)

        async def run_to_end(index: int) -> Conversation:
            conversation = await rollouts.run_rollout(index)
            if finish is not None:
                await finish(index, conversation)
            return conversation

        conversations = await gather_or_cancel(map(run_to_end, range(len(requests))))
        sampled = [each for i, each in enumerate(conversations) if i not in rollouts.given]
        return conversations, measure_turns(sampled) if self._pools else {}

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_ending:
            try:
                self._loop.run_forever()
            # A task of an environment raised it. Code that awaits the task gets it, too. The loop
            # continues, because all other tasks would wait forever without it.
            except (SystemExit, KeyboardInterrupt) as error:
                logger.warning("a task raised %s, which is ignored", type(error).__name__)
        # `close` has cancelled all tasks. A second cancellation would interrupt a task that closes
        # a connection, so only tasks that do not end in time are cancelled again.
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S))
        while tasks := asyncio.all_tasks(self._loop):
            self._cancel_tasks()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _stop_loop(self) -> None:
        self._is_ending = True
        self._loop.stop()

    def _cancel_tasks(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


class _RolloutFailedError(Exception):
    """A rollout failed; `__cause__` is the error of its environment or of its request."""


class _Round:
    """Rollouts that were requested together."""

    def __init__(
        self,
        requests: Sequence[SamplingRequest],
        *,
        prompts: Sequence[Prompt],
        priority: int,
        sampler: AsyncSampler,
        pools: Mapping[str, EnvironmentPool],
        threads: DaemonThreads,
        max_failure_fraction: float,
        vocab_size: int | None,
        given: Mapping[int, Conversation],
        on_start: Callable[[int], None] | None,
    ) -> None:
        self.given = given
        self._requests = requests
        self._prompts = prompts
        self._cohort = Cohort(
            num_open=len(requests) - len(given), priority=priority, on_start=on_start
        )
        self._sampler = sampler
        self._pools = pools
        self._threads = threads
        self._max_failure_fraction = max_failure_fraction
        self._vocab_size = vocab_size
        self._num_rollouts = Counter(prompt.environment for prompt in prompts)
        self._num_failures: Counter[str] = Counter()

    async def run_rollout(self, index: int) -> Conversation:
        """Run one rollout to its end, again if its environment fails and retries are left."""
        if index in self.given:
            return self.given[index]
        trace = RolloutTrace()
        try:
            pool = self._find_pool(index)
            if pool is None:
                return await self._run_single_turn(index, trace=trace)
            limits = RolloutLimits.from_config(pool.config, self._requests[index].sampling)
            num_retries = 0
            while True:
                conversation = Conversation(
                    request=self._requests[index], num_retries=num_retries, trace=trace
                )
                try:
                    async with self._admit(pool.open_limit, index=index):
                        await self._run_environment(
                            pool.make, conversation=conversation, index=index, limits=limits
                        )
                except _RolloutFailedError as failed:
                    cause = failed.__cause__
                    assert cause is not None
                    if num_retries == pool.config.max_retries:
                        conversation.failure = self._count_failure(cause, index=index)
                        return conversation
                    num_retries += 1
                    logger.warning(
                        "a rollout starts again, because it failed: %s", _describe_failure(cause)
                    )
                else:
                    return conversation
        finally:
            self._sampler.leave(self._cohort)

    @asynccontextmanager
    async def _admit(self, limit: PriorityLimit, *, index: int) -> AsyncIterator[None]:
        """Run the body when the limit admits the rollout, whose requests no one awaits until then.

        Otherwise those that are admitted would wait for it to request a completion.
        """
        is_waiting = not limit.is_free
        if is_waiting:
            self._sampler.leave(self._cohort)
        async with limit.acquire((self._cohort.priority, index)):
            if is_waiting:
                self._sampler.join(self._cohort)
            yield

    async def _run_single_turn(self, index: int, *, trace: RolloutTrace) -> Conversation:
        request = self._requests[index]
        conversation = Conversation(request=request, trace=trace)
        try:
            conversation.add(await self._sample(request, index=index, trace=trace))
        except RefusedRequestError as error:
            conversation.failure = self._count_failure(error, index=index)
        return conversation

    async def _run_environment(
        self,
        make: EnvironmentFactory,
        *,
        conversation: Conversation,
        index: int,
        limits: RolloutLimits,
    ) -> None:
        """Make an environment, run it to its end and close it.

        Raises:
            _RolloutFailedError: If it raises, takes too long, or returns what cannot be trained, or
                if the sampler refuses a request.
        """
        environment = await self._construct(make, index=index, trace=conversation.trace)
        try:
            if isinstance(environment, AgentEnvironment):
                await self._run_agent(
                    environment, conversation=conversation, index=index, limits=limits
                )
            else:
                await self._converse(
                    environment, conversation=conversation, index=index, limits=limits
                )
        except (InvalidAnswerError, RefusedRequestError) as error:
            raise _RolloutFailedError from error
        finally:
            await self._close(environment, index=index)

    async def _sample(
        self, request: SamplingRequest, *, index: int, trace: RolloutTrace
    ) -> Completion:
        return await self._sampler.sample(request, cohort=self._cohort, index=index, trace=trace)

    async def _converse(
        self,
        environment: Environment,
        *,
        conversation: Conversation,
        index: int,
        limits: RolloutLimits,
    ) -> None:
        trace = conversation.trace
        opening = await self._call_environment(
            environment.reset, self._prompts[index], index=index, trace=trace
        )
        if opening is not None:
            check_answer(opening, kind=Observation, vocab_size=self._vocab_size)
            add_opening(conversation, opening, limits=limits)
        for turn in range(limits.max_turns):
            request = make_turn_request(conversation, turn=turn, request_id=index, limits=limits)
            completion = await self._sample(request, index=index, trace=trace)
            conversation.add(completion)
            # The last turn is sent, too, because the environment rewards the final completion.
            observation = await self._call_environment(
                environment.step, completion.tokens, index=index, trace=trace
            )
            check_answer(observation, kind=Observation, vocab_size=self._vocab_size)
            is_last = turn == limits.max_turns - 1
            add_observation(conversation, observation, is_last=is_last, limits=limits)
            if conversation.is_done:
                return

    async def _run_agent(
        self,
        environment: AgentEnvironment,
        *,
        conversation: Conversation,
        index: int,
        limits: RolloutLimits,
    ) -> None:
        """Run an agent to its end.

        Raises:
            _RolloutFailedError: If it raises, takes too long, or requests nothing.
        """
        pool = self._get_pool(index)
        timeout_s = pool.config.step_timeout_s
        async with self._admit(pool.limit, index=index):
            outcome = AgentOutcome()
            try:
                async with asyncio.timeout(timeout_s) as timeout:
                    calls = AgentCalls(
                        request=self._requests[index],
                        limits=limits,
                        sample_request=lambda request: self._sample(
                            request, index=index, trace=conversation.trace
                        ),
                        discard=self._sampler.discard,
                        trace=conversation.trace,
                        is_concurrent=self._sampler.is_streaming,
                        timeout=timeout,
                        timeout_s=timeout_s,
                        vocab_size=self._vocab_size,
                    )
                    try:
                        with convert_exits():
                            outcome = await environment.run_agent(
                                self._prompts[index], sample=calls.sample
                            )
                    finally:
                        await calls.end()
            # The agent is the user's code, which may raise anything. The failure is counted, unless
            # a limit has ended the rollout: it is then scored as it is.
            except Exception as error:
                if calls.sampler_error is None:
                    if timeout.expired():
                        raise _RolloutFailedError from self._make_timeout_error(index)
                    if not calls.is_over_limit or not calls.finished:
                        raise _RolloutFailedError from error
        if calls.sampler_error is not None:
            # Raise it even if the agent has caught it, because the sampler serves all rollouts.
            raise calls.sampler_error
        if not calls.finished:
            prompt = self._prompts[index]
            raise _RolloutFailedError from IdleAgentError(
                f"the agent of prompt {prompt.prompt_id} ({prompt.location}) ended without a "
                "completion: let it request one, or allow failures with "
                "environment.max_failure_fraction."
            )
        check_answer(outcome, kind=AgentOutcome, vocab_size=self._vocab_size)
        calls.fill(conversation, outcome=outcome)

    def _make_timeout_error(self, index: int) -> EnvironmentTimeoutError:
        prompt, config = self._prompts[index], self._get_pool(index).config
        return EnvironmentTimeoutError(
            f"the environment of prompt {prompt.prompt_id} ({prompt.location}) did not answer "
            f"within environment.step_timeout_s = {config.step_timeout_s:g} s: raise it, or "
            "allow failures with environment.max_failure_fraction."
        )

    async def _call_environment(
        self,
        function: Callable[[Argument], T | Awaitable[T]],
        argument: Argument,
        *,
        index: int,
        trace: RolloutTrace,
    ) -> T:
        """Await a coroutine method of an environment, or call another method in a thread.

        Raises:
            _RolloutFailedError: If it raises or takes too long. A coroutine is then cancelled. A
                thread cannot be ended and is not used again.
        """
        pool = self._get_pool(index)
        timeout_s = pool.config.step_timeout_s
        async with pool.limit.acquire((self._cohort.priority, index)):
            begin = time.perf_counter()
            try:
                async with asyncio.timeout(timeout_s):
                    with convert_exits():
                        return await self._threads.call_or_await(function, argument)
            except TimeoutError as error:
                if isinstance(error.__cause__, asyncio.CancelledError):
                    raise _RolloutFailedError from self._make_timeout_error(index)
                raise _RolloutFailedError from error
            # The environment is the user's code, which may raise anything. The failure is counted.
            except Exception as error:
                raise _RolloutFailedError from error
            finally:
                trace.spans.append(Span("environment", begin, time.perf_counter()))

    async def _construct(
        self, make: EnvironmentFactory, *, index: int, trace: RolloutTrace
    ) -> Environment | AgentEnvironment:
        """Make an environment in a thread, because a constructor may load data or start a program.

        Raises:
            _RolloutFailedError: If the constructor raises.
        """
        limit = self._get_pool(index).constructor_limit
        async with limit.acquire((self._cohort.priority, index)):
            with trace.measure("environment"):
                try:
                    return await self._threads.call(make)
                # The environment is the user's code, which may raise anything.
                except Exception as error:
                    raise _RolloutFailedError from error

    async def _close(self, environment: Environment | AgentEnvironment, *, index: int) -> None:
        """Close the environment of a rollout if it can be closed.

        Raises:
            _RolloutFailedError: If it raises or takes too long.
        """
        close = getattr(environment, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(self._get_pool(index).config.step_timeout_s):
                with convert_exits():
                    await self._threads.call_or_await(close)
        # The environment is the user's code, which may raise anything. The failure is counted.
        except Exception as error:
            raise _RolloutFailedError from error

    def _find_pool(self, index: int) -> EnvironmentPool | None:
        """Return the environments of a rollout; None if it has a single turn."""
        return self._pools.get(self._prompts[index].environment)

    def _get_pool(self, index: int) -> EnvironmentPool:
        return self._pools[self._prompts[index].environment]

    def _count_failure(self, error: BaseException, *, index: int) -> str:
        """Count a failed rollout and return its reason.

        Raises:
            RolloutFailureError: See `RolloutScheduler.run_rollouts`.
        """
        name = self._prompts[index].environment
        self._num_failures[name] += 1
        pool = self._pools.get(name)
        key = "rollout" if pool is None else "environment"
        fraction = self._max_failure_fraction if pool is None else pool.config.max_failure_fraction
        num_rollouts = self._num_rollouts[name]
        if fraction == 0:
            raise error
        reason = _describe_failure(error)
        if self._num_failures[name] > fraction * num_rollouts:
            raise RolloutFailureError(
                f"{self._num_failures[name]} of {num_rollouts} rollouts failed: more than "
                f"{key}.max_failure_fraction = {fraction:g}. The last: {reason}"
            ) from error
        logger.warning("a rollout is left out, because it failed: %s", reason)
        return reason


def _describe_failure(error: BaseException) -> str:
    part = "sampler" if isinstance(error, RefusedRequestError) else "environment"
    return f"{part}: {type(error).__name__}: {error}"
