"""Sums over trained tokens and group statistics, which estimators compute advantages from.

Sums are in float64. Groups are defined by ``group_ids``, never by position.

The trained tokens of a sample need not be contiguous: tool calls are followed by observations.
Sums skip the tokens of observations, so that a reward after an observation counts for the trained
tokens before it. The "next" token is the next trained one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from temper_trainer.settings.lazy_torch import find_trained_sequences, torch

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


def assign_to_last_token(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """Return [T] float64 with each sample's reward [B] at its last trained token and 0 elsewhere.

    The reward of a sample without trained tokens is dropped.
    """
    column = torch.zeros(samples.num_tokens, dtype=torch.float64)
    position = torch.nonzero(samples.loss_mask)[:, 0]
    last = torch.zeros(samples.num_sequences, dtype=torch.long)
    last.scatter_reduce_(
        0, samples.sequence_index[position], position, reduce="amax", include_self=False
    )
    trained = find_trained_sequences(samples)
    # Samples without trained tokens are left out: their last = 0 would overwrite the first token.
    column[last[trained]] = rewards.double()[trained]
    return column


def compute_discounted_sums(
    column: Tensor, *, samples: SequenceBatch, decay: float | Tensor
) -> Tensor:
    """Return the discounted sums S_i = x_i + decay * S_(i+1) over each sample's trained tokens i.

    Args:
        column: [T]; entries at untrained tokens are ignored, even NaN.
        samples: Defines the trained tokens.
        decay: Discount per trained token, in [0, 1]; one number, or [B] one per sample.

    Returns:
        [T] float64, 0 at untrained tokens.
    """
    position = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[position]
    decays = torch.as_tensor(decay, dtype=torch.float64).expand(samples.num_sequences)[owner]
    total = column.double()[position]
    # Invariant: total[i] is the sum over terms i to i + reach - 1 of its sample. Each pass doubles
    # `reach`, so log2(longest sample) passes replace one Python iteration per token.
    reach = 1
    while reach < len(total):
        is_same_sample = owner[reach:] == owner[:-reach]
        if not bool(is_same_sample.any()):
            break
        tail = torch.where(is_same_sample, total[reach:] * decays[:-reach] ** reach, 0.0)
        total = total + torch.cat([tail, tail.new_zeros(reach)])
        reach *= 2
    return column.new_zeros(samples.num_tokens, dtype=torch.float64).index_copy(0, position, total)


def gather_next_trained(column: Tensor, *, samples: SequenceBatch) -> Tensor:
    """Return [T] float64 with the column's entry at each trained token's next trained token.

    It is 0 at a sample's last trained token and at untrained tokens.
    """
    position = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[position]
    following = column.double()[position].roll(-1)
    # roll(-1) pairs the last trained token of the batch with the first one. If both belong to the
    # same sample, comparing owners does not exclude the pair, so the position does.
    is_same_sample = (owner == owner.roll(-1)) & (torch.arange(len(position)) < len(position) - 1)
    result = column.new_zeros(samples.num_tokens, dtype=torch.float64)
    return result.index_copy(0, position, torch.where(is_same_sample, following, 0.0))


WHITEN_EPSILON = 1e-8
"""Added to the standard deviation, so that equal values become 0."""


def whiten(column: Tensor, *, mask: Tensor) -> Tensor:
    """Normalize a column to mean 0 and standard deviation 1 over the masked entries.

        A'_t = (A_t - mean(A)) / (std(A) + 1e-8)

    std divides by the entry count N, not by N - 1.

    Args:
        column: [T]; entries outside the mask are ignored, even NaN.
        mask: [T] bool.

    Returns:
        [T] float64, 0 outside the mask.
    """
    selected = column.double()[mask]
    if selected.numel() == 0:
        return torch.zeros_like(column, dtype=torch.float64)
    scaled = (selected - selected.mean()) / (selected.std(correction=0) + WHITEN_EPSILON)
    return torch.zeros_like(column, dtype=torch.float64).masked_scatter(mask, scaled)


def discount_by_turn(
    advantages: Tensor, *, turns_after: Tensor, discount: float | Tensor
) -> Tensor:
    """Scale down the advantages of earlier turns: A_t * discount ** (number of later turns).

    Args:
        advantages: [T].
        turns_after: [T] float32: number of completions that follow the token's completion in the
            rollout; 0 in the last one.
        discount: In [0, 1], or [T] of these. 0 credits only the last turn, 1 credits all turns
            equally.

    Returns:
        [T].
    """
    return advantages * discount**turns_after


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Group statistics for each sample, and the fractions of groups without a learning signal."""

    size: Tensor
    """[B] float64: number of samples in the sample's group."""
    mean: Tensor
    """[B] float64: the group's mean reward."""
    std: Tensor
    """[B] float64: unbiased standard deviation of the group's rewards; 0 in a group of one."""
    is_zero_std: Tensor
    """[B] bool: True if all rewards of the group are equal, so that the group carries no signal."""
    zero_std_fraction: float
    """Fraction of groups with equal rewards, including groups with one sample."""
    single_fraction: float
    """Fraction of groups with one sample; the other completions had no valid reward."""


def compute_group_statistics(rewards: Tensor, *, group_ids: Tensor) -> GroupStatistics:
    """Return the statistics of rewards [B] grouped by group_ids [B]; the order does not matter."""
    # Group ids are arbitrary integers, so they are mapped to 0..num_groups-1 first.
    distinct, group = torch.unique(group_ids, return_inverse=True)
    rewards = rewards.double()

    def total(column: Tensor) -> Tensor:
        return column.new_zeros(len(distinct)).index_add(0, group, column)

    size = total(torch.ones_like(rewards))
    mean = total(rewards) / size
    # A group of one has no unbiased variance; the clamp makes it 0 / 1 and not 0 / 0.
    std = (total((rewards - mean[group]).square()) / (size - 1).clamp(min=1)).sqrt()
    # The maximum and minimum are compared, not std with 0: the mean of equal rewards may round, and
    # then std is tiny but positive.
    initial = torch.zeros_like(mean)
    highest = initial.scatter_reduce(0, group, rewards, reduce="amax", include_self=False)
    lowest = initial.scatter_reduce(0, group, rewards, reduce="amin", include_self=False)
    is_zero_std = highest == lowest
    return GroupStatistics(
        size=size[group],
        mean=mean[group],
        std=std[group],
        is_zero_std=is_zero_std[group],
        zero_std_fraction=float(is_zero_std.double().mean()),
        single_fraction=float((size == 1).double().mean()),
    )


STD_EPSILON = 1e-6
"""Added to the group's standard deviation, as in the GRPO paper's implementations."""
