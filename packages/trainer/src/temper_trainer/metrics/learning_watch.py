"""Notice that a run no longer learns, from its step metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NUM_STEPS = 5
"""Steps without a learning signal before the first warning."""

_EQUAL_REWARDS = "all rewards of a step were equal"
_ZERO_STD = "all completions of a prompt had the same reward, for every prompt"
_NO_GRADIENT = "loss and gradient were 0"

_ADVICE = {
    _EQUAL_REWARDS: (
        "Compare completions and answers in samples.jsonl. If the reward misses right answers, "
        "change reward.function; if all prompts are too hard or too easy, change the prompts."
    ),
    _ZERO_STD: (
        "Use prompts that the model solves sometimes, a larger algorithm.group_size, or "
        "algorithm=dapo."
    ),
    _NO_GRADIENT: "Check the rewards in samples.jsonl and the learning rate.",
}


@dataclass(slots=True)
class LearningWatch:
    """Counts successive steps without a learning signal, whatever their reasons."""

    uses_rewards: bool
    """True if rewards are the only signal: there is no loss from a teacher."""
    _count: int = field(default=0, init=False)
    _reasons: set[str] = field(default_factory=set, init=False)
    """Reasons of the steps counted."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return a warning after `NUM_STEPS` such steps in a row, and after 10 and 100 times more.

        Example:
            >>> watch = LearningWatch(uses_rewards=True)
            >>> zero = {"reward/mean": 0.0, "reward/std": 0.0}
            >>> warnings = [watch.observe(step, zero) for step in range(1, 6)]
            >>> warnings[:4], warnings[4].split(":")[:2]
            ([None, None, None, None], ['WARNING', ' no learning signal in steps 1 to 5'])
        """
        reason = self._find_reason(metrics)
        if reason is None:
            self._count = 0
            self._reasons.clear()
            return None
        self._count += 1
        self._reasons.add(reason)
        if not _is_warned_after(self._count):
            return None
        several = " (the last of several reasons)" if len(self._reasons) > 1 else ""
        rewards = f" ({metrics['reward/mean']:g})" if reason == _EQUAL_REWARDS else ""
        return (
            f"WARNING: no learning signal in steps {step - self._count + 1} to {step}: "
            f"{reason}{rewards}{several}. {_ADVICE[reason]}"
        )

    def _find_reason(self, metrics: Mapping[str, float]) -> str | None:
        if self.uses_rewards:
            if metrics.get("reward/std") == 0:
                return _EQUAL_REWARDS
            # A group of one completion has no spread, and a critic does not compare groups.
            is_grouped = metrics.get("groups/single_fraction", 1.0) < 1
            is_grouped = is_grouped and "critic/loss" not in metrics
            if is_grouped and metrics.get("groups/zero_std_fraction") == 1:
                return _ZERO_STD
        if metrics.get("actor/loss") == 0 and metrics.get("actor/grad_norm") == 0:
            return _NO_GRADIENT
        return None


def _is_warned_after(count: int) -> bool:
    while count > NUM_STEPS and count % 10 == 0:
        count //= 10
    return count == NUM_STEPS
