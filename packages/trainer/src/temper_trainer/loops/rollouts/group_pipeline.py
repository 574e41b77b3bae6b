"""Sample groups as far ahead of training as their credits allow, and train the first ready ones.

Used by loop ``async``. `temper_trainer.loops.rollouts.ready_groups` decides what a step trains, and
`batch_pipeline.BatchPipeline` is for loops and settings that train batches as they were requested.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from temper_trainer.concurrency import convert_exits
from temper_trainer.loops.rollouts.batch_pipeline import AdmissionRule, Credits
from temper_trainer.loops.rollouts.ready_groups import ReadyGroups
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class GroupSink(Protocol[T_contra]):
    """Receives the groups of a batch of requests."""

    def start(self, group: int) -> None:
        """Record that a request of a group reaches the sampler."""
        ...

    def add(self, group: int, value: T_contra) -> None:
        """Add a group whose rollouts are all scored."""
        ...


class GroupPipeline(Generic[T]):
    """The groups of a run that are being sampled or wait for their step."""

    def __init__(
        self,
        scheduler: RolloutScheduler,
        sample: Callable[[int, GroupSink[T]], Coroutine[object, object, None]],
        *,
        rule: AdmissionRule,
        first_step: int,
        last_step: int,
        batch_size: int,
        recorder: CompletionRecorder | None = None,
        replay: CompletionReplay | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            scheduler: Runs the rollouts.
            sample: Samples as many groups as a step trains, and gives each of them to the sink when
                it is ready. Runs in the event loop of the scheduler.
            rule: When further groups may start.
            first_step: Number of the first step.
            last_step: Number of the last step.
            batch_size: Groups per step.
            recorder: Records the groups of each step.
            replay: Determines the groups of each step.
        """
        self._scheduler = scheduler
        self._sample = sample
        self.rule = rule
        self._first_step = first_step
        self._last_step = last_step
        self._credits = Credits(max_staleness=rule.max_staleness)
        self._groups = ReadyGroups[T](max_staleness=rule.max_staleness, batch_size=batch_size)
        self._recorder = recorder
        self._replay = replay
        self._requests: dict[int, Future[None]] = {}
        """Running or finished requests, by the step whose credit they have."""
        self._errors: list[BaseException] = []
        """Errors of requests. `_take` cannot read them from the futures, which are set later."""
        self._changed = asyncio.Event()
        """Set in the event loop when a group becomes ready, or requests end."""

    @property
    def oldest_step(self) -> int | None:
        """First step whose credit has requests that are not all trained; None if there is none."""
        return min(self._requests, default=None)

    def forget(self, step: int) -> None:
        """Forget the requests with the credit of a step, whose groups are all trained."""
        del self._requests[step]

    def start_batches(self) -> None:
        """Request all groups that have a credit."""
        while self._credits.can_start:
            step = self._first_step + self._credits.num_started
            if step > self._last_step:
                return
            self._credits = self._credits.start()
            self._requests[step] = self._scheduler.start(self._request(step))

    def take(self, step: int) -> list[T]:
        """Wait for the groups of the next step and return them, in the order of their prompts."""
        self.start_batches()
        return self._scheduler.run(self._take(step))

    def wait(self) -> None:
        """Wait until all requested groups are ready. An error is raised by `take`."""
        wait(self._requests.values())

    @contextmanager
    def sync_weights(self, step: int) -> Iterator[None]:
        """Let nothing be sampled while the body publishes the weights of a step.

        Afterwards the step counts as trained, and further groups may start.
        """
        del step
        with self._scheduler.pause_sampling():
            yield
            # Before sampling continues: what starts now has the new weights.
            self._scheduler.run(self._train())
        self._credits = self._credits.train()
        self.start_batches()

    # `start` and `add` make this object the sink of the requests. They run in the event loop.

    def start(self, group: int) -> None:
        """Record that a request of a group reaches the sampler."""
        self._groups.start(group)

    def add(self, group: int, value: T) -> None:
        """Add a group whose rollouts are all scored."""
        self._groups.add(group, value)
        self._changed.set()

    async def _request(self, step: int) -> None:
        try:
            await self._sample(step, self)
        except BaseException as error:
            self._errors.append(error)
            raise
        finally:
            self._changed.set()

    async def _take(self, step: int) -> list[T]:
        while (chosen := self._choose(step)) is None:
            if self._errors:
                # Convert SystemExit and the like: they would look like a cancellation of this step.
                with convert_exits():
                    raise self._errors[0]
            self._changed.clear()
            await self._changed.wait()
        if self._recorder is not None:
            self._recorder.add_batch(step, groups=chosen)
        return self._groups.take(chosen)

    def _choose(self, step: int) -> Sequence[int] | None:
        if self._replay is None:
            return self._groups.choose()
        recorded = self._replay.find_batch(step)
        return recorded if self._groups.has(recorded) else None

    async def _train(self) -> None:
        self._groups.train()
