"""Group-relative advantages: a completion against the others of its prompt. GRPO and Dr. GRPO."""

import torch
from torch import Tensor

from temper_trainer.algorithms.groups import group_statistics

EPSILON = 1e-6
"""Added to the group's deviation, as published."""


def group_relative_advantage(rewards: Tensor, *, group_ids: Tensor, scale_by_std: bool) -> Tensor:
    """Reward above the group's mean, in units of the group's spread if asked.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6), over the completions of one prompt; std is the unbiased one.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B]; completions of one prompt share it, in any order and number.
        scale_by_std: True is GRPO as published; False is Dr. GRPO, which removes the difficulty bias.

    Returns:
        [B] float64. Exactly 0 in a group with equal rewards, also where their mean rounds, and in a group of one, which has nothing to be
        compared with.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Liu et al. 2025, arXiv:2503.20783.
    """
    group = group_statistics(rewards, group_ids=group_ids)
    above = torch.where(group.is_flat, 0.0, rewards.double() - group.mean)
    return above / (group.std + EPSILON) if scale_by_std else above
