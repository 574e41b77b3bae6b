"""Loop ``one_step_off``: while step n trains, step n + 1 is sampled, with the weights that step n began with.

    sampling    | 1 | 2 | 3 | 4 |
    training        | 1 | 2 | 3 | 4 |
    published       ^   ^   ^   ^

A step trains on completions of the weights one update before its own. Every batch is a function of (run.seed, step) and those weights, so a
run repeats bit for bit; one that goes on from a checkpoint samples its first batch with the weights of that checkpoint.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from temper_engine_api.objective import Objective
from temper_trainer.loops.clock import StepClock
from temper_trainer.loops.controllers import Controllers
from temper_trainer.loops.interrupts import abandonable_late
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.sampling import Collected, collect
from temper_trainer.loops.staleness import staleness_metrics
from temper_trainer.loops.step import StepResult, train_on
from temper_trainer.reward.shaping import RunningStats
from temper_trainer.types import DataCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A step's completions, maybe still being sampled."""

    future: "Future[Collected]"
    """The completions."""
    clock: StepClock
    """Seconds of their sampling."""
    cursor: DataCursor
    """In the data before this batch: where a run that goes on from here begins."""


class OneStepOff:
    """The steps of one run."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._next: _Batch | None = None

    @property
    def cursor(self) -> DataCursor:
        """Of the first prompt that no step has trained on."""
        return self._rooms.prompts.cursor if self._next is None else self._next.cursor

    def step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """One step; see the picture above."""
        rooms, clock, begin = self._rooms, StepClock(), time.perf_counter()
        batch, self._next = self._next or self._begin(step, controllers.rewards), None
        with clock.phase("wait"), abandonable_late():
            collected = batch.future.result()
        if step < rooms.config.run.total_steps:
            self._next = self._begin(step + 1, collected.moments)
        controllers = replace(controllers, rewards=collected.moments)
        found, controllers = train_on(
            rooms,
            collected.rollouts,
            step=step,
            objectives=objectives,
            controllers=controllers,
            clock=clock,
        )
        metrics = (
            collected.metrics
            | found
            | staleness_metrics(collected.rollouts, version=rooms.publisher.version)
        )
        if self._next is not None:
            with clock.phase("wait"):
                self._next.future.exception()  # raised when it is taken; until then the sampler must be left alone
        with clock.phase("weight_sync"):
            metrics |= rooms.publisher.publish(rooms.canary)
        seconds = {
            **clock.seconds,
            **batch.clock.seconds,
            "time/step_s": time.perf_counter() - begin,
        }
        metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(
            batch.clock.seconds["time/rollout_s"], 1e-9
        )
        metrics["data/epoch"] = float(self.cursor.epoch)
        return StepResult(
            metrics={**metrics, **seconds}, rollouts=collected.rollouts, controllers=controllers
        )

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Nothing is being sampled or scored in the body."""
        if self._next is not None:
            self._next.future.exception()
        yield

    def close(self) -> None:
        """Wait for what was begun."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, step: int, moments: RunningStats) -> _Batch:
        clock, cursor = StepClock(), self._rooms.prompts.cursor

        def sample() -> Collected:
            with clock.phase("rollout"):
                return collect(self._rooms, step=step, clock=clock, moments=moments)

        return _Batch(future=self._thread.submit(sample), clock=clock, cursor=cursor)
