"""Advantage estimators that compare the completions of one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.algorithms.token_advantages import whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per sample the statistics of its group, and per group whether it can teach anything."""

    size: Tensor
    """[B] float64 samples in the sample's group."""
    mean: Tensor
    """[B] float64 mean reward of the group."""
    std: Tensor
    """[B] float64 unbiased deviation; 0 in a group of one."""
    is_zero_std: Tensor
    """[B] bool: every reward of the group is the same, so that it says nothing about which completion is better."""
    zero_std_fraction: float
    """Share of groups that are flat, groups of one among them."""
    single_fraction: float
    """Share of groups of one: the rewards of the others failed."""


def compute_group_statistics(rewards: Tensor, *, group_ids: Tensor) -> GroupStatistics:
    """Statistics of rewards [B] by group_ids [B]; samples of a group may stand anywhere."""
    distinct, group = torch.unique(group_ids, return_inverse=True)
    rewards = rewards.double()

    def total(column: Tensor) -> Tensor:
        return column.new_zeros(len(distinct)).index_add(0, group, column)

    size = total(torch.ones_like(rewards))
    mean = total(rewards) / size
    std = (total((rewards - mean[group]).square()) / (size - 1).clamp(min=1)).sqrt()
    edge = torch.zeros_like(mean)
    highest = edge.scatter_reduce(0, group, rewards, reduce="amax", include_self=False)
    lowest = edge.scatter_reduce(0, group, rewards, reduce="amin", include_self=False)
    is_zero_std = highest == lowest
    return GroupStatistics(
        size=size[group],
        mean=mean[group],
        std=std[group],
        is_zero_std=is_zero_std[group],
        zero_std_fraction=float(is_zero_std.double().mean()),
        single_fraction=float((size == 1).double().mean()),
    )


EPSILON = 1e-6
"""Added to the group's deviation, as published."""


def compute_grpo_advantages(rewards: Tensor, *, group_ids: Tensor, scale_by_std: bool) -> Tensor:
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
    group = compute_group_statistics(rewards, group_ids=group_ids)
    above = torch.where(group.is_zero_std, 0.0, rewards.double() - group.mean)
    return above / (group.std + EPSILON) if scale_by_std else above


def compute_rloo_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Reward above the mean of the group's other completions.

    A_i = r_i - 1/(G - 1) * sum of r_j, j != i, which is G/(G - 1) * (r_i - mean(r)): unbiased, since the baseline never saw r_i.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B]; completions of one prompt share it, in any order and number.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards and in a group of one, which has no others.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, arXiv:2402.14740, section 3.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    scale = group.size / (group.size - 1).clamp(min=1)
    return torch.where(group.is_zero_std, 0.0, scale * (rewards.double() - group.mean))


def compute_opo_advantages(rewards: Tensor, *, lengths: Tensor, group_ids: Tensor) -> Tensor:
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
    group = compute_group_statistics(rewards, group_ids=group_ids)
    distinct, place = torch.unique(group_ids, return_inverse=True)
    weights = lengths.double()
    total = weights.new_zeros(len(distinct)).index_add(0, place, weights)
    weighted = weights.new_zeros(len(distinct)).index_add(0, place, weights * rewards.double())
    baseline = weighted / total.clamp(min=1.0)
    return torch.where(group.is_zero_std, 0.0, rewards.double() - baseline[place])


def compute_gpg_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Reward above the group's mean, scaled up by the share of completions that have a gradient.

    A_i = B / (B - M) * (r_i - mean(r)), with M the completions of groups whose rewards are all equal; no division by the deviation.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B]; completions of one prompt share it, in any order and number.

    Returns:
        [B] float64; 0 in a group with equal rewards.

    Source: Chu et al. 2025, arXiv:2504.02546, equations 6 and 7 with F_norm = 1.
    """
    alive = float((~compute_group_statistics(rewards, group_ids=group_ids).is_zero_std).sum())
    scale = len(rewards) / alive if alive else 1.0
    return scale * compute_grpo_advantages(rewards, group_ids=group_ids, scale_by_std=False)


def compute_remax_advantages(rewards: Tensor, *, baselines: Tensor) -> Tensor:
    """Reward above that of the same prompt's greedy completion.

    A_i = r_i - r_greedy: unbiased, since the greedy completion does not depend on the one that was drawn.

    Args:
        rewards: [B] one scalar per completion.
        baselines: [B] the reward of the greedy completion of each sample's prompt.

    Returns:
        [B] float64.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """
    return rewards.double() - baselines.double()


def compute_gdpo_advantages(
    components: Tensor, *, weights: Sequence[float], penalty: Tensor, samples: SequenceBatch
) -> Tensor:
    """Weighted sum of group-relative advantages, whitened over the trained tokens of the step.

    S_i = sum over k of w_k * (r_ik - mean_k) / (std_k + 1e-6) within the group of i; A = (S - mean(S)) / std(S). So a combination of
    rewards keeps its own advantage where a sum of rewards would collapse it onto another's.

    Args:
        components: [B, K] rewards.
        weights: K factors.
        penalty: [B] taken from the sum before it is whitened: the KL to a reference.
        samples: the step's.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Liu et al. 2026, arXiv:2601.05242, section 3.
    """
    total = sum(
        weight
        * compute_grpo_advantages(components[:, k], group_ids=samples.group_ids, scale_by_std=True)
        for k, weight in enumerate(weights)
    )
    return whiten((total - penalty)[samples.sequence_index], mask=samples.loss_mask)


def compute_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, *, samples: SequenceBatch
) -> Tensor:
    """Reward above the group's mean, on every trained token, whitened over the trained tokens of the step.

    Args:
        rewards: [B] one scalar per completion.
        samples: the step's.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    """
    above = compute_grpo_advantages(rewards, group_ids=samples.group_ids, scale_by_std=False)
    return whiten(above[samples.sequence_index], mask=samples.loss_mask)
