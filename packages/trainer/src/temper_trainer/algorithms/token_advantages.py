"""Advantage estimators that work token by token: GAE and REINFORCE++."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.reduction import find_trained_sequences


def place_at_last_token(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """[T] float64: each sample's reward [B] at its last trained token, 0 elsewhere; a sample without trained tokens has no place for it."""
    column = torch.zeros(samples.num_tokens, dtype=torch.float64)
    place = torch.nonzero(samples.loss_mask)[:, 0]
    last = torch.zeros(samples.num_sequences, dtype=torch.long)
    last.scatter_reduce_(0, samples.sequence_index[place], place, reduce="amax", include_self=False)
    trained = find_trained_sequences(samples)
    column[last[trained]] = rewards.double()[trained]
    return column


def compute_discounted_sums(column: Tensor, *, samples: SequenceBatch, decay: float) -> Tensor:
    """Sum of what is still to come: S_i = x_i + decay * S_(i+1) over the trained tokens i of each sample.

    Args:
        column: [T]; entries at untrained tokens are ignored, whatever they hold.
        samples: whose trained tokens are summed.
        decay: per trained token, in [0, 1].

    Returns:
        [T] float64, 0 at untrained tokens.
    """
    place = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[place]
    total = column.double()[place]
    reach = 1  # total[i] covers the next `reach` terms; doubling needs log2(longest) passes, not one per token
    while reach < len(total):
        is_same = owner[reach:] == owner[:-reach]
        if not bool(is_same.any()):
            break
        tail = torch.where(is_same, total[reach:] * decay**reach, 0.0)
        total = total + torch.cat([tail, tail.new_zeros(reach)])
        reach *= 2
    return column.new_zeros(samples.num_tokens, dtype=torch.float64).index_copy(0, place, total)


def gather_next_trained(column: Tensor, *, samples: SequenceBatch) -> Tensor:
    """[T] float64: at each trained token the column's entry at the sample's next trained token, 0 after the last; 0 at untrained tokens."""
    place = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[place]
    following = column.double()[place].roll(-1)
    is_same = (owner == owner.roll(-1)) & (torch.arange(len(place)) < len(place) - 1)
    result = column.new_zeros(samples.num_tokens, dtype=torch.float64)
    return result.index_copy(0, place, torch.where(is_same, following, 0.0))


EPSILON = 1e-8
"""Added to the deviation, so that equal values become 0."""


def whiten(column: Tensor, *, mask: Tensor) -> Tensor:
    """The column with mean 0 and deviation 1 over the masked entries.

    A'_t = (A_t - mean(A)) / (std(A) + 1e-8); std divides by the number of entries, not by one less.

    Args:
        column: [T]; entries outside the mask are ignored, whatever they hold.
        mask: [T] bool.

    Returns:
        [T] float64, 0 outside the mask.
    """
    kept = column.double()[mask]
    if kept.numel() == 0:
        return torch.zeros_like(column, dtype=torch.float64)
    scaled = (kept - kept.mean()) / (kept.std(correction=0) + EPSILON)
    return torch.zeros_like(column, dtype=torch.float64).masked_scatter(mask, scaled)


def compute_gae(
    token_rewards: Tensor,
    *,
    values: Tensor,
    samples: SequenceBatch,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages, and the returns that the value model learns.

    delta_i = r_i + gamma * V_(i+1) - V_i, A_i = delta_i + gamma * lambda * A_(i+1), R_i = A_i + V_i

    over the trained tokens i of a sample, in order; what lies between two of them (tool and observation spans) is passed over. After the
    last one there is nothing: V = A = 0, also where a completion was cut at its token limit.

    Args:
        token_rewards: [T], see ``advantages.token_rewards``.
        values: [T] value of the state before each token; entries at untrained tokens are ignored, whatever they hold.
        samples: the step's.
        gamma: discount per trained token.
        gae_lambda: 0 trusts the value model, 1 the reward.

    Returns:
        (advantages, returns), both [T] float64, 0 at untrained tokens.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.
    """
    own = torch.where(samples.loss_mask, values.double(), 0.0)
    deltas = token_rewards.double() + gamma * gather_next_trained(values, samples=samples) - own
    advantages = compute_discounted_sums(deltas, samples=samples, decay=gamma * gae_lambda)
    return advantages, torch.where(samples.loss_mask, advantages + own, 0.0)


def compute_reinforce_plus_plus_advantages(
    token_rewards: Tensor, *, samples: SequenceBatch, gamma: float
) -> Tensor:
    """Discounted reward to go, whitened over the trained tokens of the step.

    A_t = (R_t - mean(R)) / std(R) with R_t = r_t + gamma * R_(t+1); the KL penalty is already in r.

    Args:
        token_rewards: [T], see ``advantages.token_rewards``.
        samples: the step's.
        gamma: discount per trained token.

    Returns:
        [T] float64, 0 at untrained tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    return whiten(
        compute_discounted_sums(token_rewards, samples=samples, decay=gamma), mask=samples.loss_mask
    )


def discount_by_turn(advantages: Tensor, *, turns_after: Tensor, discount: float) -> Tensor:
    """Advantages of earlier turns made smaller: what was said last did most for the outcome.

    A_t = A_t * discount ** (completions of the rollout after the token's own).

    Args:
        advantages: [T].
        turns_after: [T] float32, 0 in the last completion.
        discount: from 0, where the last turn alone is credited, to 1, where all are alike.

    Returns:
        [T].
    """
    return advantages * discount**turns_after
