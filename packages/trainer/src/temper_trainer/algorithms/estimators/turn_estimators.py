"""Estimators that credit turns, and token rewards with those of turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temper_trainer.algorithms.estimators.estimator import AdvantageEstimator, StepRewards
from temper_trainer.settings.lazy_torch import lazy_module, torch
from temper_trainer.settings.ranges import UnitFloat
from temper_trainer.settings.variants import variant
from temper_trainer.types import TURN_REWARDS, TURNS_AFTER

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import turn_credit as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.turn_credit")


def select_token_rewards(step: StepRewards, *, turn_rewards: bool) -> Tensor:
    """Return the token rewards [T] of a step.

    Args:
        step: Rewards of the step.
        turn_rewards: True to have the environment's reward of a turn at the turn's last token;
            False to have all at the last token of the rollout.
    """
    earned = step.samples.columns.get(TURN_REWARDS)
    if not turn_rewards or earned is None:
        return step.token_rewards
    # Moves the rewards of turns without changing their sum, so it adds to rewards and penalty.
    return step.token_rewards + formulas.compute_turn_rewards(
        torch.zeros_like(step.rewards), turn_rewards=earned, samples=step.samples
    )


@variant("turn_grpo")
class TurnGrpo(AdvantageEstimator):
    """Return of each turn, compared with the same turn of the group (arXiv:2505.11821)."""

    gamma: UnitFloat = 1.0
    """Discount per turn; 0 credits a turn only with its own reward."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_turn_advantages``."""
        rewards = select_token_rewards(step, turn_rewards=True)
        # Without a column every rollout has one turn.
        turns_after = step.samples.columns.get(TURNS_AFTER, torch.zeros_like(rewards))
        return formulas.compute_turn_advantages(
            rewards,
            turns_after=turns_after,
            samples=step.samples,
            gamma=self.gamma,
            scale_by_std=self.scale_by_std,
        ), None
