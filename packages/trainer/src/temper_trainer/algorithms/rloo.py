"""REINFORCE with a leave-one-out baseline."""

import torch
from torch import Tensor

from temper_trainer.algorithms.groups import group_statistics


def leave_one_out_advantage(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Reward above the mean of the group's other completions.

    A_i = r_i - 1/(G - 1) * sum of r_j, j != i, which is G/(G - 1) * (r_i - mean(r)): unbiased, since the baseline never saw r_i.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B]; completions of one prompt share it, in any order and number.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards and in a group of one, which has no others.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, arXiv:2402.14740, section 3.
    """
    group = group_statistics(rewards, group_ids=group_ids)
    scale = group.size / (group.size - 1).clamp(min=1)
    return torch.where(group.is_flat, 0.0, scale * (rewards.double() - group.mean))
