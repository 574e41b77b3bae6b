"""Sample batches as far ahead of training as the admission rule of ``loop`` allows.

The loops differ only in this rule and in what happens to open rollouts at a weight sync:

=============  =====================================  ================================
``loop``       batch n + 1 starts                     at a weight sync
=============  =====================================  ================================
sync           when step n is published               nothing is open
one_step_off   when batch n is sampled, before it     waits until the batch is sampled
               trains
async          when its credit allows, while earlier  pauses open completions, or waits
               batches are still sampled              for them
=============  =====================================  ================================

A batch is formed when all groups of its prompts are ready, and batches are trained in the order of
their prompts: see `temper_trainer.loops.rollouts.staleness`. Loop ``async`` forms batches of the
groups that are ready first (`group_pipeline`), except with dynamic sampling.
"""

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from temper_trainer.config.rollout import AsynchronyConfig
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.loops.rollouts.staleness import Credits, get_max_staleness

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """When the sampling of a batch may start."""

    max_staleness: int
    """Number of weight updates that sampling may run ahead of training."""
    overlaps: bool
    """True if a batch may start before the previous one is sampled, and weights may change while
    it is sampled."""

    @classmethod
    def from_config(cls, loop: str, asynchrony: AsynchronyConfig) -> "AdmissionRule":
        """Return the rule of a loop."""
        return cls(max_staleness=get_max_staleness(loop, asynchrony), overlaps=loop == "async")


class BatchPipeline(Generic[T]):
    """The batches of a run that are being sampled or wait for their step."""

    def __init__(
        self,
        scheduler: RolloutScheduler,
        sample: Callable[[int], Coroutine[object, object, T]],
        *,
        rule: AdmissionRule,
        first_step: int,
        last_step: int,
    ) -> None:
        """Start nothing yet.

        Args:
            scheduler: Runs the rollouts.
            sample: Samples the batch of a step; runs in the event loop of the scheduler.
            rule: When a batch may start.
            first_step: Number of the first step.
            last_step: Number of the last step.
        """
        self._scheduler = scheduler
        self._sample = sample
        self.rule = rule
        self._first_step = first_step
        self._last_step = last_step
        self._credits = Credits(max_staleness=rule.max_staleness)
        self._batches: dict[int, Future[T]] = {}

    @property
    def oldest_step(self) -> int | None:
        """First step whose batch has started and is not trained; None if there is none."""
        return min(self._batches, default=None)

    def start_batches(self) -> None:
        """Start to sample every batch that the rule allows."""
        while self._credits.can_start:
            step = self._first_step + self._credits.num_started
            is_free = self.rule.overlaps or all(each.done() for each in self._batches.values())
            if step > self._last_step or not is_free:
                return
            self._credits = self._credits.start()
            self._batches[step] = self._scheduler.start(self._sample(step))

    def take(self, step: int) -> T:
        """Wait for the batch of the next step and return it."""
        if step not in self._batches:
            self.start_batches()
        return self._scheduler.wait(self._batches[step])

    def wait(self) -> None:
        """Wait until all batches that have started are sampled.

        An error of the sampling is raised by `take`.
        """
        wait(self._batches.values())

    @contextmanager
    def sync_weights(self, step: int) -> Iterator[None]:
        """Let nothing be sampled while the body publishes the weights of a step.

        Afterwards the step counts as trained, and the next batches may start.
        """
        if not self.rule.overlaps:
            # A batch is sampled with one version of the weights.
            self.wait()
        with self._scheduler.pause_sampling():
            yield
        del self._batches[step]
        # After the publish: a batch that starts with this credit must see the new weights.
        self._credits = self._credits.train()
        if self.rule.overlaps:
            self.start_batches()
