"""Estimators whose objective is not a prompt's mean reward: MaxRL and pass@k.

MaxRL maximizes the log of the pass rate, so that rare successes count more. The pass@k estimator
maximizes the best reward of a group, so that completions need not all be right.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from temper_trainer.algorithms.advantages.advantage_statistics import (
    STD_EPSILON,
    compute_group_statistics,
)
from temper_trainer.algorithms.advantages.estimators.estimator import (
    AdvantageEstimator,
    StepRewards,
)
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@variant("maxrl")
class MaxRl(AdvantageEstimator):
    """Difference to the group's mean reward, divided by this mean (arXiv:2602.02710)."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_maxrl_advantages``; warn once about negative ones."""
        # Add the KL penalty back, which was subtracted; the tolerance is for rounding.
        negative = step.rewards + step.penalty < -1e-6
        if negative.any():
            _warn_about_negative_rewards()
        return compute_maxrl_advantages(step.rewards, group_ids=step.samples.group_ids), None


@cache  # once in a process, because every step of a run may have such rewards
def _warn_about_negative_rewards() -> None:
    logger.warning(
        "algorithm.advantage maxrl divides by the mean reward of a prompt, but some rewards are "
        "negative: prompts whose mean is 0 or less do not train, and those just above it train too "
        "strongly. Use rewards of at least 0"
    )


@variant("grpo_passk")
class GrpoPassk(AdvantageEstimator):
    """The best completion's lead over the second best; 0 for all others (arXiv:2503.19595)."""

    scale_by_std: bool = True
    """Divide by the group's standard deviation."""

    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return the advantages of ``compute_passk_advantages``."""
        return compute_passk_advantages(
            step.rewards, group_ids=step.samples.group_ids, scale_by_std=self.scale_by_std
        ), None


def compute_maxrl_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Return rewards minus the group's mean, divided by the group's mean.

        A_i = (r_i - mean(r)) / mean(r)

    For rewards of 0 and 1, the update follows the gradient of log(pass rate), expanded as a series
    and cut off after term G: G = 1 would be REINFORCE, a large G is maximum likelihood.

    Args:
        rewards: [B] one scalar per completion, at least 0.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards, in a group of one, and where the mean
        is 0 or less. A KL penalty can make it negative.

    Source: Tajwar et al. 2026, arXiv:2602.02710, section 3.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    has_signal = ~group.is_zero_std & (group.mean > 0)
    # The divisor is 1 elsewhere, because 0 / 0 is NaN.
    mean = torch.where(has_signal, group.mean, 1.0)
    return torch.where(has_signal, (rewards.double() - mean) / mean, 0.0)


def compute_passk_advantages(rewards: Tensor, *, group_ids: Tensor, scale_by_std: bool) -> Tensor:
    """Return the lead of the group's best completion over the second; 0 for all others.

        A_i = (max_j r_j - max_{j != i} r_j) / (std(r) + 1e-6)

    The difference is 0 unless i is the only best completion. Without the division it is an unbiased
    leave-one-out estimate for the expected best reward of G completions, which is pass@G for
    rewards of 0 and 1.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for all completions of a prompt; any order, any group size.
        scale_by_std: True to divide by the group's unbiased standard deviation.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards and in a group of one.

    Source: Tang et al. 2025, arXiv:2503.19595, section 3.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    rewards = rewards.double()
    _, group_index = torch.unique(group_ids, return_inverse=True)
    # Sort by group, and within a group by descending reward: the first two are compared.
    order = rewards.argsort(descending=True, stable=True)
    order = order[group_index[order].argsort(stable=True)]
    owner = group_index[order]
    is_best = torch.ones_like(owner, dtype=torch.bool)
    is_best[1:] = owner[1:] != owner[:-1]
    lead = torch.zeros_like(rewards)
    lead[:-1] = rewards[order[:-1]] - rewards[order[1:]]
    advantages = torch.zeros_like(rewards)
    advantages[order] = torch.where(is_best, lead, 0.0)
    # In a group with one sample, the second is from another group.
    advantages = torch.where(group.size > 1, advantages, 0.0)
    return advantages / (group.std + STD_EPSILON) if scale_by_std else advantages
