"""Advantage estimators: pure functions of rewards, values and group ids, with sums in float64.

Those that work token by token come first (GAE, REINFORCE++), then those that compare a completion
with its group or another baseline. Groups are defined by ``group_ids``, never by position.

The trained tokens of a sample need not be contiguous: tool calls are followed by observations. A
reward that comes after an observation belongs to the decisions before it, so "next" always means
the next trained token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.reduction import find_trained_sequences, sum_per_sequence


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
        is_same = owner[reach:] == owner[:-reach]
        if not bool(is_same.any()):
            break
        tail = torch.where(is_same, total[reach:] * decays[:-reach] ** reach, 0.0)
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
    # The roll wraps around. With a single sample, the owners alone would not exclude the last
    # token.
    is_same = (owner == owner.roll(-1)) & (torch.arange(len(position)) < len(position) - 1)
    result = column.new_zeros(samples.num_tokens, dtype=torch.float64)
    return result.index_copy(0, position, torch.where(is_same, following, 0.0))


WHITEN_EPSILON = 1e-8
"""Added to the standard deviation, so that equal values become 0."""


def whiten(column: Tensor, *, mask: Tensor) -> Tensor:
    """Normalize a column to mean 0 and standard deviation 1 over the masked entries.

        A'_t = (A_t - mean(A)) / (std(A) + 1e-8)

    std divides by the number of entries N, not by N - 1.

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


def compute_gae(
    token_rewards: Tensor,
    *,
    values: Tensor,
    samples: SequenceBatch,
    gamma: float,
    gae_lambda: float | Tensor,
    value_lambda: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute GAE advantages, and the returns that the value model is trained on.

        delta_i = r_i + gamma * V_(i+1) - V_i
        A_i = delta_i + gamma * lambda * A_(i+1)
        R_i = A_i + V_i   with lambda = value_lambda

    The index i runs over the trained tokens of a sample; tool results and other untrained tokens
    between them are skipped. V and A are 0 after the last trained token, also if a completion was
    truncated at its token limit.

    Args:
        token_rewards: [T], see ``advantages.compute_token_rewards``.
        values: [T] value of the state before each token; entries at untrained tokens are ignored,
            even NaN.
        samples: B sequences, T tokens.
        gamma: Discount per trained token.
        gae_lambda: 0 bootstraps from the value model only, 1 uses the rewards only. One number, or
            [B] one per sample, see `compute_length_adaptive_lambdas`.
        value_lambda: Lambda of the returns; None takes gae_lambda.

    Returns:
        (advantages, returns), both [T] float64, 0 at untrained tokens.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16; another lambda for the
    returns: Yuan et al. 2025, arXiv:2503.01491, section 4.2.
    """
    trained_values = torch.where(samples.loss_mask, values.double(), 0.0)
    deltas = (
        token_rewards.double()
        + gamma * gather_next_trained(values, samples=samples)
        - trained_values
    )
    advantages = compute_discounted_sums(deltas, samples=samples, decay=gamma * gae_lambda)
    value_advantages = (
        advantages
        if value_lambda is None
        else compute_discounted_sums(deltas, samples=samples, decay=gamma * value_lambda)
    )
    return advantages, torch.where(samples.loss_mask, value_advantages + trained_values, 0.0)


def compute_length_adaptive_lambdas(samples: SequenceBatch, *, length_factor: float) -> Tensor:
    """Return a GAE lambda for each sample that grows with its length.

        lambda = 1 - 1 / (length_factor * l), at least 0

    l is the number of trained tokens. The sum of the weights of the deltas, 1 / (1 - lambda), is
    then proportional to the length, so that a reward at the end reaches the first tokens of long
    completions, too.

    Returns:
        [B] float64 in [0, 1).

    Source: Yue et al. 2025, arXiv:2504.05118, section 4.2 (VAPO), with length_factor 0.05.
    """
    lengths = sum_per_sequence(samples.loss_mask.double(), samples)
    # The product is below 1 for short completions, and 0 for one without trained tokens.
    return 1.0 - 1.0 / (length_factor * lengths).clamp(min=1.0)


def compute_reinforce_plus_plus_advantages(
    token_rewards: Tensor, *, samples: SequenceBatch, gamma: float
) -> Tensor:
    """Return the discounted reward-to-go, whitened over the step's trained tokens.

        R_t = r_t + gamma * R_(t+1)
        A_t = (R_t - mean(R)) / std(R)

    Args:
        token_rewards: [T] with the KL penalty subtracted, see ``advantages.compute_token_rewards``.
        samples: B sequences, T tokens.
        gamma: Discount per trained token.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    return whiten(
        compute_discounted_sums(token_rewards, samples=samples, decay=gamma), mask=samples.loss_mask
    )


def discount_by_turn(advantages: Tensor, *, turns_after: Tensor, discount: float) -> Tensor:
    """Scale down the advantages of earlier turns: A_t * discount ** (number of later turns).

    Args:
        advantages: [T].
        turns_after: [T] float32: completions of the rollout after the token's own; 0 in the last
            one.
        discount: In [0, 1]. 0 credits only the last turn, 1 credits all turns equally.

    Returns:
        [T].
    """
    return advantages * discount**turns_after


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Statistics of each sample's group, and the fractions of groups without a learning signal."""

    size: Tensor
    """[B] float64: number of samples in the sample's group."""
    mean: Tensor
    """[B] float64: mean reward of the group."""
    std: Tensor
    """[B] float64: unbiased standard deviation of the group's rewards; 0 in a group of one."""
    is_zero_std: Tensor
    """[B] bool: True if all rewards of the group are equal, so that the group carries no signal."""
    zero_std_fraction: float
    """Fraction of groups with equal rewards, groups of one included."""
    single_fraction: float
    """Fraction of groups of one, whose other completions had no valid reward."""


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


def compute_grpo_advantages(rewards: Tensor, *, group_ids: Tensor, scale_by_std: bool) -> Tensor:
    """Return rewards minus the group's mean, optionally divided by the group's standard deviation.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    The mean and the unbiased std are over the completions of one prompt.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for the completions of one prompt; any order, any group size.
        scale_by_std: True is GRPO. False is Dr. GRPO, which does not divide and so does not
            overweight prompts with a small spread.

    Returns:
        [B] float64. Exactly 0 in a group with equal rewards, even if their mean rounds, and in a
        group of one.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Liu et al.
    2025, arXiv:2503.20783.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    centered = torch.where(group.is_zero_std, 0.0, rewards.double() - group.mean)
    return centered / (group.std + STD_EPSILON) if scale_by_std else centered


def compute_rloo_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Return rewards minus the mean of the group's other completions (leave-one-out).

        A_i = r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) * (r_i - mean(r))

    Unbiased, because the baseline does not depend on r_i.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for the completions of one prompt; any order, any group size.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards and in a group of one.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al.
    2024, arXiv:2402.14740, section 3.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    scale = group.size / (group.size - 1).clamp(min=1)
    return torch.where(group.is_zero_std, 0.0, scale * (rewards.double() - group.mean))


def compute_opo_advantages(rewards: Tensor, *, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Return rewards minus the group's length-weighted mean, OPO's variance-minimizing baseline.

        A_i = r_i - sum_j l_j * r_j / sum_j l_j

    The sums are over the completions j of the prompt. The baseline is optimal if the squared norm
    of a completion's gradient is proportional to its length.

    Args:
        rewards: [B] one scalar per completion.
        lengths: [B] number of trained tokens of each completion.
        group_ids: [B] equal for the completions of one prompt; any order, any group size.

    Returns:
        [B] float64; exactly 0 in a group with equal rewards.

    Source: Hao et al. 2025, arXiv:2505.23585, equation 7.
    """
    group = compute_group_statistics(rewards, group_ids=group_ids)
    distinct, group_index = torch.unique(group_ids, return_inverse=True)
    weights = lengths.double()
    total = weights.new_zeros(len(distinct)).index_add(0, group_index, weights)
    weighted = weights.new_zeros(len(distinct)).index_add(
        0, group_index, weights * rewards.double()
    )
    # The clamp only matters for a group without trained tokens, which would be 0 / 0.
    baseline = weighted / total.clamp(min=1.0)
    return torch.where(group.is_zero_std, 0.0, rewards.double() - baseline[group_index])


def compute_gpg_advantages(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
    """Return rewards minus the group's mean, scaled up for completions in zero-std groups.

        A_i = B / (B - M) * (r_i - mean(r))

    M is the number of completions in groups with equal rewards, which have no gradient. The scale
    keeps them from diluting the mean over the batch. There is no division by the standard
    deviation.

    Args:
        rewards: [B] one scalar per completion.
        group_ids: [B] equal for the completions of one prompt; any order, any group size.

    Returns:
        [B] float64; 0 in a group with equal rewards.

    Source: Chu et al. 2025, arXiv:2504.02546, equations 6 and 7 with F_norm = 1.
    """
    num_with_signal = float(
        (~compute_group_statistics(rewards, group_ids=group_ids).is_zero_std).sum()
    )
    scale = len(rewards) / num_with_signal if num_with_signal else 1.0
    return scale * compute_grpo_advantages(rewards, group_ids=group_ids, scale_by_std=False)


def compute_remax_advantages(rewards: Tensor, *, baselines: Tensor) -> Tensor:
    """Return rewards minus the reward of the same prompt's greedy completion.

        A_i = r_i - r_greedy

    Unbiased, because the greedy completion does not depend on the sampled one.

    Args:
        rewards: [B] one scalar per completion.
        baselines: [B] reward of the greedy completion of each sample's prompt.

    Returns:
        [B] float64.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """
    return rewards.double() - baselines.double()


def compute_gdpo_advantages(
    components: Tensor, *, weights: Sequence[float], penalty: Tensor, samples: SequenceBatch
) -> Tensor:
    """Return the whitened weighted sum of per-reward GRPO advantages.

        S_i = sum_k w_k * (r_ik - mean_k) / (std_k + 1e-6)
        A = (S - mean(S)) / std(S)

    mean_k and std_k are over the group of i; mean(S) and std(S) are over the step's trained tokens.
    Normalizing each reward separately keeps combinations of rewards apart that a sum of the raw
    rewards would map to the same value.

    Args:
        components: [B, K] rewards.
        weights: K weights.
        penalty: [B] KL penalty, subtracted from S before whitening.
        samples: B sequences, T tokens.

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
    """Return rewards minus the group's mean on every trained token, whitened over the step.

    Args:
        rewards: [B] one scalar per completion.
        samples: B sequences, T tokens.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    """
    advantages = compute_grpo_advantages(rewards, group_ids=samples.group_ids, scale_by_std=False)
    return whiten(advantages[samples.sequence_index], mask=samples.loss_mask)
