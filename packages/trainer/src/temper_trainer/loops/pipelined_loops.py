"""Loops that sample while they train: ``one_step_off`` and ``async``.

Loop ``one_step_off`` samples step n + 1 while step n trains, with the weights that step n starts
with::

    sampling    | 1 | 2 | 3 | 4 |
    training        | 1 | 2 | 3 | 4 |
    published       ^   ^   ^   ^

So a step trains on completions of the weights one update before its own. Every batch is a function
of (run.seed, step) and those weights, so a run repeats bit for bit. A run that resumes from a
checkpoint samples its first batch with the weights of that checkpoint.

Loop ``async`` samples batch after batch in one thread, as far as the credits allow
(`temper_trainer.loops.staleness`). Weights are published after each update: completions in progress
are stopped and continue under the new weights (``asynchrony.partial_rollouts``), or the publish
waits for them.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from temper_engine_api.objective import Objective
from temper_trainer.loops.interrupts import allow_stop_after_half_grace
from temper_trainer.loops.rl_step import (
    Controllers,
    StepLoop,
    StepResult,
    SyncLoop,
    train_on_rollouts,
)
from temper_trainer.loops.run_components import RunComponents
from temper_trainer.loops.sampling import SampledStep, sample_step
from temper_trainer.loops.staleness import CreditAccount, measure_staleness
from temper_trainer.progress import StepTimer
from temper_trainer.reward.scoring import RunningStats
from temper_trainer.rollout.pausable_sampler import PausableSampler
from temper_trainer.types import DataCursor


@contextmanager
def open_step_loop(
    components: RunComponents, *, first_step: int, controllers: Controllers
) -> Iterator[StepLoop]:
    """Make the loop that ``config.loop`` names; stop its sampling when the body ends.

    Args:
        components: Components of the run, with published weights.
        first_step: Number of the first step.
        controllers: Controllers for the first step.
    """
    loop: OneStepOffLoop | AsyncLoop
    match components.config.loop:
        case "sync":
            yield SyncLoop(components)
            return
        case "one_step_off":
            loop = OneStepOffLoop(components)
        case "async":
            loop = AsyncLoop(
                components, first_step=first_step, reward_stats=controllers.reward_stats
            )
    try:
        yield loop
    finally:
        loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingBatch:
    """A batch of loop ``one_step_off`` whose sampling may still be in progress."""

    future: "Future[SampledStep]"
    timer: StepTimer
    """Time of the sampling."""
    cursor: DataCursor
    """Position in the data before this batch."""


class OneStepOffLoop:
    """Loop ``one_step_off``; see the module."""

    def __init__(self, components: RunComponents) -> None:
        self._components = components
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._next_batch: _PendingBatch | None = None

    @property
    def cursor(self) -> DataCursor:
        """Position of the batch in progress, which a resumed run samples again."""
        return (
            self._components.prompts.cursor if self._next_batch is None else self._next_batch.cursor
        )

    def run_step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """Run one step; see `StepLoop`."""
        components, timer, start = self._components, StepTimer(), time.perf_counter()
        # Only the first step of a process finds no batch in progress.
        batch = self._next_batch or self._start_sampling(step, controllers.reward_stats)
        self._next_batch = None
        with timer.measure("wait"), allow_stop_after_half_grace():
            sampled = batch.future.result()
        # Start sampling step n + 1 before step n trains: the two overlap, and the samples come from
        # the weights before the updates of step n.
        if step < components.config.run.total_steps:
            self._next_batch = self._start_sampling(step + 1, sampled.reward_stats)
        metrics, controllers = train_on_rollouts(
            sampled.rollouts,
            config=components.config,
            roles=components.roles,
            teachers=components.teachers,
            objectives=objectives,
            controllers=replace(controllers, reward_stats=sampled.reward_stats),
            step=step,
            timer=timer,
            log=components.log,
        )
        staleness = measure_staleness(sampled.rollouts, version=components.publisher.version)
        if self._next_batch is not None:
            with timer.measure("wait"):
                # The sampler must not get new weights while it samples. An error of the sampling
                # is raised by the next step, which takes the result.
                self._next_batch.future.exception()
        with timer.measure("weight_sync"):
            sync_metrics = components.publisher.publish(components.canary)
        return _make_result(
            sampled,
            metrics | staleness | sync_metrics,
            controllers=controllers,
            timer=timer,
            sampling_timer=batch.timer,
            start=start,
            cursor=self.cursor,
        )

    @contextmanager
    def pause_sampling(self) -> Iterator[None]:
        """Wait until the next batch is sampled."""
        if self._next_batch is not None:
            self._next_batch.future.exception()
        yield

    def close(self) -> None:
        """Wait for the batch in progress."""
        self._thread.shutdown(cancel_futures=True)

    def _start_sampling(self, step: int, reward_stats: RunningStats) -> _PendingBatch:
        timer, cursor = StepTimer(), self._components.prompts.cursor

        def sample() -> SampledStep:
            with timer.measure("rollout"):
                return sample_step(
                    self._components, step=step, timer=timer, reward_stats=reward_stats
                )

        return _PendingBatch(future=self._thread.submit(sample), timer=timer, cursor=cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyBatch:
    """A sampled batch of loop ``async``."""

    sampled: SampledStep
    timer: StepTimer
    """Time of the sampling."""
    next_cursor: DataCursor
    """Position in the data after this batch, from which a run resumes after its step."""


class AsyncLoop:
    """Loop ``async``; see the module. The sampler of the components is a PausableSampler."""

    def __init__(
        self, components: RunComponents, *, first_step: int, reward_stats: RunningStats
    ) -> None:
        """Start sampling at once.

        Args:
            components: Components of the run, with published weights.
            first_step: Number of the first step.
            reward_stats: Statistics of the rewards before it.
        """
        assert isinstance(components.sampler, PausableSampler)
        self._components, self._sampler = components, components.sampler
        self._first_step = first_step
        self._credits = CreditAccount(components.config.asynchrony.max_staleness)
        # Held while a batch is sampled, so that an evaluation can wait for the end of a batch.
        self._sampling_lock = threading.Lock()
        self._batch_ready = threading.Condition()
        self._ready: dict[int, _ReadyBatch] = {}
        self._error: BaseException | None = None
        self.cursor = components.prompts.cursor
        """Position after the last trained batch; the prompts themselves are ahead of it."""
        self._thread = threading.Thread(
            target=self._sample, args=(reward_stats,), daemon=True, name="sampling"
        )
        self._thread.start()

    def run_step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """Run one step; afterwards, the sampling thread has another credit."""
        components, timer, start = self._components, StepTimer(), time.perf_counter()
        with timer.measure("wait"), allow_stop_after_half_grace():
            batch = self._take_batch(step)
        sampled = batch.sampled
        staleness = measure_staleness(sampled.rollouts, version=components.publisher.version)
        metrics, controllers = train_on_rollouts(
            sampled.rollouts,
            config=components.config,
            roles=components.roles,
            teachers=components.teachers,
            objectives=objectives,
            controllers=replace(controllers, reward_stats=sampled.reward_stats),
            step=step,
            timer=timer,
            log=components.log,
        )
        num_resumed = self._sampler.num_resumed
        with timer.measure("weight_sync"), self._sampler.pause():
            sync_metrics = components.publisher.publish(components.canary)
        # After the publish: a batch that starts with this credit must see the new weights.
        self._credits.train()
        self.cursor = batch.next_cursor
        num_continued = float(self._sampler.num_resumed - num_resumed)
        return _make_result(
            sampled,
            metrics | staleness | sync_metrics | {"rollout/continued": num_continued},
            controllers=controllers,
            timer=timer,
            sampling_timer=batch.timer,
            start=start,
            cursor=self.cursor,
        )

    @contextmanager
    def pause_sampling(self) -> Iterator[None]:
        """Wait for the batch in progress; start the next one after the body."""
        with self._sampling_lock:
            yield

    def close(self) -> None:
        """Cancel the batch in progress and start no other one."""
        self._credits.close()
        if self._thread.is_alive():
            self._sampler.cancel()
        # Not without limit: a call that ignores the cancellation must not keep the run from ending.
        # The thread is a daemon.
        self._thread.join(timeout=60)

    def _take_batch(self, step: int) -> _ReadyBatch:
        with self._batch_ready:
            self._batch_ready.wait_for(lambda: step in self._ready or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._ready.pop(step)

    def _sample(self, reward_stats: RunningStats) -> None:
        """Sample batches in order until the last step or `close`; runs in its own thread."""
        try:
            while (number := self._credits.wait_to_start()) is not None:
                step, timer = self._first_step + number, StepTimer()
                if step > self._components.config.run.total_steps:
                    return
                with self._sampling_lock, timer.measure("rollout"):
                    sampled = sample_step(
                        self._components, step=step, timer=timer, reward_stats=reward_stats
                    )
                reward_stats = sampled.reward_stats
                batch = _ReadyBatch(
                    sampled=sampled, timer=timer, next_cursor=self._components.prompts.cursor
                )
                self._credits.finish(number)
                with self._batch_ready:
                    self._ready[step] = batch
                    self._batch_ready.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by the step that waits for the batch
            with self._batch_ready:
                self._error = error
                self._batch_ready.notify_all()


def _make_result(
    sampled: SampledStep,
    metrics: Mapping[str, float],
    *,
    controllers: Controllers,
    timer: StepTimer,
    sampling_timer: StepTimer,
    start: float,
    cursor: DataCursor,
) -> StepResult:
    """Merge the metrics and times of sampling and training."""
    rollout_s = max(sampling_timer.seconds["time/rollout_s"], 1e-9)
    merged = {
        **sampled.metrics,
        **metrics,
        "rollout/tokens_per_s": sampled.metrics["rollout/tokens"] / rollout_s,
        "data/epoch": float(cursor.epoch),
        **timer.seconds,
        **sampling_timer.seconds,
        "time/step_s": time.perf_counter() - start,
    }
    return StepResult(metrics=merged, rollouts=sampled.rollouts, controllers=controllers)
