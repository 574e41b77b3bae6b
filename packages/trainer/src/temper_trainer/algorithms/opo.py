"""OPO: the baseline that makes the variance of the policy's gradient smallest, as far as gradients grow with length."""

import torch
from torch import Tensor

from temper_trainer.algorithms.groups import group_statistics


def optimal_baseline_advantage(rewards: Tensor, *, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Reward above the group's mean weighted by length.

    A_i = r_i - sum of l_j r_j / sum of l_j over the completions j of the prompt.

    Args:
        rewards: [B] one scalar per completion.
        lengths: [B] trained tokens of each.
        group_ids: [B]; completions of one prompt share it, in any order and number.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards.

    Source: Hao et al. 2025, arXiv:2505.23585, equation 7.
    """
    group = group_statistics(rewards, group_ids=group_ids)
    distinct, place = torch.unique(group_ids, return_inverse=True)
    weights = lengths.double()
    total = weights.new_zeros(len(distinct)).index_add(0, place, weights)
    weighted = weights.new_zeros(len(distinct)).index_add(0, place, weights * rewards.double())
    baseline = weighted / total.clamp(min=1.0)
    return torch.where(group.is_flat, 0.0, rewards.double() - baseline[place])
