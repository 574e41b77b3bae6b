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

A batch is formed when all groups of its prompts are ready.

A batch needs a credit before it is sampled (`Credits`). Batches are numbered from 0 in the order in
which they start, and are trained in that order. When batch n is trained, n updates have been made.
So batch n may start after n - max_staleness updates: its first token is then at most max_staleness
updates old when it is trained. Training waits for slow batches; no batch is ever overtaken, and no
rollout is discarded because it is slow.

This cannot deadlock. If training waits for batch n, n updates have been made, so every batch up to
n + max_staleness has its credit, including n. And a batch that has started finishes without waiting
for the trainer.

Loop ``async`` forms batches of the groups that are ready first (`group_pipeline`), except with
dynamic sampling. It chooses the groups of a batch when it trains (`ready_groups`): the credits then
only bound how many groups are sampled ahead.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from temper_engine_api.errors import BatchError
from temper_trainer.config.rollout import AsynchronyConfig
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.types import Completion, Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """The admission rule of all loops, as a state.

    Example:
        >>> credits = Credits(max_staleness=1).start().start()
        >>> credits.can_start  # a third batch could be two updates old
        False
        >>> credits.train().can_start
        True
    """

    max_staleness: int
    """Maximum age of a batch when it is trained, in weight updates."""
    num_started: int = 0
    """Number of batches whose sampling has started."""
    num_trained: int = 0
    """Number of trained batches, which is the number of weight updates."""

    @property
    def can_start(self) -> bool:
        """True if there is a credit for another batch."""
        # The next batch has number num_started, and is trained after num_started updates.
        return self.num_started <= self.num_trained + self.max_staleness

    def start(self) -> "Credits":
        """Return the state after the sampling of another batch has started."""
        assert self.can_start
        return replace(self, num_started=self.num_started + 1)

    def train(self) -> "Credits":
        """Return the state after the next batch was trained and its update published."""
        assert self.num_trained < self.num_started
        return replace(self, num_trained=self.num_trained + 1)


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


def get_max_staleness(loop: str, asynchrony: AsynchronyConfig) -> int:
    """Return how many updates the oldest weights of a completion may be behind."""
    return {"sync": 0, "one_step_off": 1, "async": asynchrony.max_staleness}[loop]


def check_staleness(
    completions: Sequence[Completion], *, loop: str, asynchrony: AsynchronyConfig, version: int
) -> None:
    """Check that the weights of all completions are recent enough for the loop.

    Args:
        completions: Completions that were just sampled.
        loop: Name of the loop (``loop``).
        asynchrony: Limits of loop ``async``.
        version: Version of the published weights.

    Raises:
        BatchError: If a completion is from older weights than the loop allows, or from newer ones.
    """
    oldest = version - get_max_staleness(loop, asynchrony)
    wrong = [c for c in completions if not oldest <= c.weight_version <= version]
    if wrong:
        raise BatchError(
            f"{len(wrong)} completions are from weights {wrong[0].weight_version}, but weights "
            f"{version} are published and loop {loop} allows {oldest} to {version}: the "
            "sampler did not load the published weights."
        )


def measure_staleness(rollouts: Sequence[Rollout], *, version: int) -> dict[str, float]:
    """Return the ``staleness/*`` metrics of a step.

    Args:
        rollouts: Rollouts of the step.
        version: Version of the weights when the training of the step starts.

    Returns:
        ``staleness/mean``: updates since the weights that sampled a token, averaged over tokens.
        ``staleness/max``: the maximum over completions. ``staleness/mixed_fraction``: fraction of
        completions with tokens from several versions.
    """
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    counts = count_tokens_by_staleness(rollouts, version=version)
    total_age = sum(age * count for age, count in counts.items())
    num_mixed = sum(bool(c.token_versions) for c in completions)
    return {
        "staleness/mean": total_age / max(sum(counts.values()), 1),
        "staleness/max": float(max((version - c.weight_version for c in completions), default=0)),
        "staleness/mixed_fraction": num_mixed / max(len(completions), 1),
    }


def count_tokens_by_staleness(rollouts: Sequence[Rollout], *, version: int) -> dict[int, int]:
    """Count the tokens of completions by the age of the weights that sampled them, in updates.

    Args:
        rollouts: Rollouts of a step.
        version: Version of the weights when the training of the step starts.
    """
    counts: Counter[int] = Counter()
    for completion in (each for rollout in rollouts for each in rollout.completions):
        # Empty unless the completion continued under newer weights.
        if completion.token_versions:
            ages, numbers = np.unique(
                version - np.asarray(completion.token_versions, dtype=np.int64),
                return_counts=True,
            )
            counts.update(dict(zip(ages.tolist(), numbers.tolist(), strict=True)))
        else:
            counts[version - completion.weight_version] += len(completion.tokens)
    return dict(counts)
