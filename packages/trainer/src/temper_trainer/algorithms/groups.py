"""Statistics over the completions of one prompt, found by ``group_ids``, never by position. Sums are float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per sample the statistics of its group, and per group whether it can teach anything."""

    size: Tensor
    """[B] float64 samples in the sample's group."""
    mean: Tensor
    """[B] float64 mean reward of the group."""
    std: Tensor
    """[B] float64 unbiased deviation; 0 in a group of one."""
    is_flat: Tensor
    """[B] bool: every reward of the group is the same, so that it says nothing about which completion is better."""
    flat_share: float
    """Share of groups that are flat, groups of one among them."""
    single_share: float
    """Share of groups of one: the rewards of the others failed."""


def group_statistics(rewards: Tensor, *, group_ids: Tensor) -> GroupStatistics:
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
    is_flat = highest == lowest
    return GroupStatistics(
        size=size[group],
        mean=mean[group],
        std=std[group],
        is_flat=is_flat[group],
        flat_share=float(is_flat.double().mean()),
        single_share=float((size == 1).double().mean()),
    )
