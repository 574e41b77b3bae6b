"""GPG: the group's mean is the baseline, and groups that teach nothing do not dilute the gradient."""

from torch import Tensor

from temper_trainer.algorithms.groups import group_statistics
from temper_trainer.algorithms.grpo import group_relative_advantage


def group_gradient_advantage(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Reward above the group's mean, scaled up by the share of completions that have a gradient.

    A_i = B / (B - M) * (r_i - mean(r)), with M the completions of groups whose rewards are all equal; no division by the deviation.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B]; completions of one prompt share it, in any order and number.

    Returns:
        [B] float64; 0 in a group with equal rewards.

    Source: Chu et al. 2025, arXiv:2504.02546, equations 6 and 7 with F_norm = 1.
    """
    alive = float((~group_statistics(rewards, group_ids=group_ids).is_flat).sum())
    scale = len(rewards) / alive if alive else 1.0
    return scale * group_relative_advantage(rewards, group_ids=group_ids, scale_by_std=False)
