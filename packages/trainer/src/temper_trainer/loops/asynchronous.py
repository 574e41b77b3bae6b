"""Loop ``async``: sampling never waits for training unless it would run too far ahead, training never waits unless nothing is there.

One thread samples batch after batch, as far as its credits reach (``credits``). After each update the weights are published at once:
unfinished completions are stopped and go on under the new weights (``asynchrony.partial_rollouts``), or are waited for.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from temper_engine_api.objective import Objective
from temper_trainer.loops.clock import StepClock
from temper_trainer.loops.controllers import Controllers
from temper_trainer.loops.credits import CreditAccount
from temper_trainer.loops.interrupts import abandonable_late
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.sampling import Collected, collect
from temper_trainer.loops.staleness import staleness_metrics
from temper_trainer.loops.step import StepResult, train_on
from temper_trainer.reward.shaping import RunningStats
from temper_trainer.rollout.pausable_sampler import PausableSampler
from temper_trainer.types import DataCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A step's completions."""

    collected: Collected
    """Scored."""
    clock: StepClock
    """Seconds of their sampling."""
    next_cursor: DataCursor
    """In the data after this batch: where a run that goes on from its step begins."""


class Asynchronous:
    """The steps of one run; ``rooms.sampler`` is a ContinuingSampler."""

    def __init__(self, rooms: Rooms, *, first_step: int, moments: RunningStats) -> None:
        """Begin to sample at once.

        Args:
            rooms: open ones, with weights published.
            first_step: number of the first step.
            moments: of the rewards before it.
        """
        assert isinstance(rooms.sampler, PausableSampler)
        self._rooms, self._sampler = rooms, rooms.sampler
        self._first_step = first_step
        self._account = CreditAccount(rooms.config.asynchrony.max_staleness)
        self._alone = threading.Lock()
        self._arrived = threading.Condition()
        self._ready: dict[int, _Batch] = {}
        self._error: BaseException | None = None
        self.cursor = rooms.prompts.cursor
        """Of the first prompt that no step has trained on."""
        self._thread = threading.Thread(
            target=self._sample, args=(moments,), daemon=True, name="sampling"
        )
        self._thread.start()

    def step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """Train on the next batch in order, publish, give a credit back."""
        rooms, clock, begin = self._rooms, StepClock(), time.perf_counter()
        with clock.phase("wait"), abandonable_late():
            batch = self._take(step)
        collected = batch.collected
        stale = staleness_metrics(collected.rollouts, version=rooms.publisher.version)
        controllers = replace(controllers, rewards=collected.moments)
        found, controllers = train_on(
            rooms,
            collected.rollouts,
            step=step,
            objectives=objectives,
            controllers=controllers,
            clock=clock,
        )
        metrics = collected.metrics | found | stale
        continued = self._sampler.num_resumed
        with clock.phase("weight_sync"), self._sampler.pause():
            metrics |= rooms.publisher.publish(rooms.canary)
        self._account.train()
        self.cursor = batch.next_cursor
        metrics["rollout/continued"] = float(self._sampler.num_resumed - continued)
        metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(
            batch.clock.seconds["time/rollout_s"], 1e-9
        )
        metrics["data/epoch"] = float(self.cursor.epoch)
        seconds = {
            **clock.seconds,
            **batch.clock.seconds,
            "time/step_s": time.perf_counter() - begin,
        }
        return StepResult(
            metrics={**metrics, **seconds}, rollouts=collected.rollouts, controllers=controllers
        )

    @contextmanager
    def settled(self) -> Iterator[None]:
        """No batch is being sampled or scored in the body."""
        with self._alone:
            yield

    def close(self) -> None:
        """Begin nothing more; what is open is interrupted and dropped."""
        self._account.close()
        if self._thread.is_alive():
            self._sampler.cancel()
        self._thread.join(timeout=60)

    def _take(self, step: int) -> _Batch:
        with self._arrived:
            self._arrived.wait_for(lambda: step in self._ready or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._ready.pop(step)

    def _sample(self, moments: RunningStats) -> None:
        """Runs in its own thread: batch after batch in order, until the last step or the account is closed."""
        try:
            while (number := self._account.wait_to_begin()) is not None:
                step, clock = self._first_step + number, StepClock()
                if step > self._rooms.config.run.total_steps:
                    return
                with self._alone, clock.phase("rollout"):
                    collected = collect(self._rooms, step=step, clock=clock, moments=moments)
                moments = collected.moments
                batch = _Batch(
                    collected=collected, clock=clock, next_cursor=self._rooms.prompts.cursor
                )
                self._account.finish(number)
                with self._arrived:
                    self._ready[step] = batch
                    self._arrived.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by the step that waits for it
            with self._arrived:
                self._error = error
                self._arrived.notify_all()
