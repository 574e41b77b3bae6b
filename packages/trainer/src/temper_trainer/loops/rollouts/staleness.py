"""Staleness: how many weight updates sampling may run ahead of training, and how many it did.

A batch needs a credit before it is sampled (`Credits`). Batches are numbered from 0 in the order in
which they start, and are trained in that order. When batch n is trained, n updates have been made.
So batch n may start after n - max_staleness updates: its first token is then at most max_staleness
updates old when it is trained. Training waits for slow batches; no batch is ever overtaken, and no
rollout is discarded because it is slow.

This cannot deadlock. If training waits for batch n, n updates have been made, so every batch up to
n + max_staleness has its credit, including n. And a batch that has started finishes without waiting
for the trainer.

Loop ``async`` chooses the groups of a batch when it trains (`ready_groups`): the credits then only
bound how many groups are sampled ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from temper_engine_api.errors import BatchError
from temper_trainer.config.rollout import AsynchronyConfig
from temper_trainer.types import Completion, Rollout


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
    ages = [
        version - token_version
        for c in completions
        # Empty unless the completion continued under newer weights.
        for token_version in (c.token_versions or (c.weight_version,) * len(c.tokens))
    ]
    num_mixed = sum(bool(c.token_versions) for c in completions)
    return {
        "staleness/mean": sum(ages) / max(len(ages), 1),
        "staleness/max": float(max((version - c.weight_version for c in completions), default=0)),
        "staleness/mixed_fraction": num_mixed / max(len(completions), 1),
    }
