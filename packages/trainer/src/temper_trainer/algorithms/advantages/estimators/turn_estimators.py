"""Estimators that credit turns, and token rewards that include turn rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from temper_trainer.algorithms.advantages.advantage_statistics import (
    STD_EPSILON,
    assign_to_last_token,
    compute_group_statistics,
)
from temper_trainer.algorithms.advantages.estimators.estimator import (
    AdvantageEstimator,
    StepRewards,
)
from temper_trainer.settings.lazy_torch import sum_per_sequence, torch
from temper_trainer.settings.ranges import UnitFloat
from temper_trainer.settings.variants import variant
from temper_trainer.types import TURN_REWARDS, TURNS_AFTER

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


def select_token_rewards(step: StepRewards, *, turn_rewards: bool) -> Tensor:
    """Return the token rewards [T] of a step.

    Args:
        step: Rewards of the step.
        turn_rewards: True to have the environment's reward of a turn at the turn's last token;
            False to have all at the rollout's last token.
    """
    earned = step.samples.columns.get(TURN_REWARDS)
    if not turn_rewards or earned is None:
        return step.token_rewards
    # With rewards of 0, compute_turn_rewards returns only the differences: each turn's reward at
    # its last token, and minus their sum at the rollout's last token.
    return step.token_rewards + compute_turn_rewards(
        torch.zeros_like(step.rewards), turn_rewards=earned, samples=step.samples
    )


@variant("turn_grpo")
class TurnGrpo(AdvantageEstimator):
    """Compares each turn's return with its group (arXiv:2505.11821)."""

    is_per_token: ClassVar[bool] = True

    gamma: UnitFloat = 1.0
    """Discount per turn; 0 credits a turn only with its own reward."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_turn_advantages``."""
        rewards = select_token_rewards(step, turn_rewards=True)
        # Without a column every rollout has one turn.
        turns_after = step.samples.columns.get(TURNS_AFTER, torch.zeros_like(rewards))
        return compute_turn_advantages(
            rewards,
            turns_after=turns_after,
            samples=step.samples,
            gamma=self.gamma,
            scale_by_std=self.scale_by_std,
        ), None


def compute_turn_rewards(
    rewards: Tensor, *, turn_rewards: Tensor, samples: SequenceBatch
) -> Tensor:
    """Return per-token rewards, with the environment's rewards at their turn's end.

    What is left of a rollout's reward, the score after shaping, is at its last trained token. So
    the rewards of a rollout add up to the same number as without turns.

    Args:
        rewards: [B] reward per rollout, including its turn rewards.
        turn_rewards: [T] reward from the environment at each turn's last trained token, else 0.
        samples: B sequences, T tokens.

    Returns:
        [T] float64.
    """
    earned = torch.where(samples.loss_mask, turn_rewards.double(), 0.0)
    rest = rewards.double() - sum_per_sequence(earned, samples)
    return assign_to_last_token(rest, samples=samples) + earned


def compute_turn_advantages(
    token_rewards: Tensor,
    *,
    turns_after: Tensor,
    samples: SequenceBatch,
    gamma: float,
    scale_by_std: bool,
) -> Tensor:
    """Compare each turn's return with the returns of the group's rollouts for the same turn.

        G_k = R_k + gamma * G_(k+1)
        A_k = (G_k - mean(G_k)) / (std(G_k) + 1e-6)

    R_k is the sum of the rewards in turn k. Mean and unbiased standard deviation are over the
    rollouts of the prompt that have a turn k. Every trained token of a turn has its advantage.

    Args:
        token_rewards: [T], see `compute_turn_rewards`.
        turns_after: [T] turns of the rollout after the token's own.
        samples: B sequences, T tokens.
        gamma: Discount per turn, in [0, 1]; 0 credits a turn only with its own reward.
        scale_by_std: True to divide by the standard deviation.

    Returns:
        [T] float64; 0 at untrained tokens, and in turns that only one rollout of its group has, or
        all have with the same return.

    Source: Zeng et al. 2025, arXiv:2505.11821, section 4 (turn-level advantages of MT-GRPO), with
    returns in place of the sum of one turn's and the last reward.
    """
    mask, owner = samples.loss_mask, samples.sequence_index
    later = torch.where(mask, turns_after, 0.0).long()
    num_turns = int(later.max()) + 1 if len(later) else 1
    cell = owner * num_turns + later
    shape = (samples.num_sequences, num_turns)
    rewards = torch.where(mask, token_rewards.double(), 0.0)
    returns = rewards.new_zeros(shape).view(-1).index_add(0, cell, rewards).view(shape)
    # Column 0 is the last turn, so a turn's return needs the return in the previous column.
    for k in range(1, num_turns):
        returns[:, k] += gamma * returns[:, k - 1]
    has_turn = mask.new_zeros(shape).view(-1).index_fill(0, cell[mask], True).view(shape)
    # Turns are compared by their number from the first one, not from the last.
    first = (has_turn * torch.arange(num_turns)).amax(dim=1, keepdim=True)
    number = first - torch.arange(num_turns)
    _, group = torch.unique(samples.group_ids, return_inverse=True)
    compared = (group[:, None] * num_turns + number)[has_turn]
    statistics = compute_group_statistics(returns[has_turn], group_ids=compared)
    centered = torch.where(statistics.is_zero_std, 0.0, returns[has_turn] - statistics.mean)
    if scale_by_std:
        centered = centered / (statistics.std + STD_EPSILON)
    advantages = returns.new_zeros(shape).masked_scatter(has_turn, centered)
    return torch.where(mask, advantages.view(-1)[cell], 0.0)
