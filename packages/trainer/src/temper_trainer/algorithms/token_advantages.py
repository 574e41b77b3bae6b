"""Advantage estimators that work token by token (GAE, REINFORCE++), and the scans they are made of.

The trained tokens of a sample need not be contiguous: tool calls are followed by observations. A
reward that comes after an observation belongs to the decisions before it, so "next" always means
the next trained token.
"""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.reduction import find_trained_sequences


def place_at_last_token(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """Return [T] float64 with each sample's reward [B] at its last trained token and 0 elsewhere.

    The reward of a sample without trained tokens is dropped.
    """
    column = torch.zeros(samples.num_tokens, dtype=torch.float64)
    position = torch.nonzero(samples.loss_mask)[:, 0]
    last = torch.zeros(samples.num_sequences, dtype=torch.long)
    last.scatter_reduce_(
        0, samples.sequence_index[position], position, reduce=("amax"), include_self=False
    )
    trained = find_trained_sequences(samples)
    # Only these: a sample without trained tokens has last = 0 and would overwrite the first token.
    column[last[trained]] = rewards.double()[trained]
    return column


def compute_discounted_sums(column: Tensor, *, samples: SequenceBatch, decay: float) -> Tensor:
    """Return the discounted sums S_i = x_i + decay * S_(i+1) over each sample's trained tokens i.

    Args:
        column: [T]; entries at untrained tokens are ignored, even NaN.
        samples: Defines the trained tokens.
        decay: Discount per trained token, in [0, 1].

    Returns:
        [T] float64, 0 at untrained tokens.
    """
    position = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[position]
    total = column.double()[position]
    # total[i] covers the next `reach` terms. Doubling needs log2(longest sample) vectorized passes
    # in place of one Python iteration per token.
    reach = 1
    while reach < len(total):
        is_same = owner[reach:] == owner[:-reach]
        if not bool(is_same.any()):
            break
        tail = torch.where(is_same, total[reach:] * decay**reach, 0.0)
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


EPSILON = 1e-8
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
    scaled = (selected - selected.mean()) / (selected.std(correction=0) + EPSILON)
    return torch.zeros_like(column, dtype=torch.float64).masked_scatter(mask, scaled)


def compute_gae(
    token_rewards: Tensor,
    *,
    values: Tensor,
    samples: SequenceBatch,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute GAE advantages, and the returns that the value model is trained on.

        delta_i = r_i + gamma * V_(i+1) - V_i
        A_i = delta_i + gamma * lambda * A_(i+1)
        R_i = A_i + V_i

    The index i runs over the trained tokens of a sample; tool results and other untrained tokens
    between them are skipped. V and A are 0 after the last trained token, also if a completion was
    truncated at its token limit.

    Args:
        token_rewards: [T], see ``advantages.compute_token_rewards``.
        values: [T] value of the state before each token; entries at untrained tokens are ignored,
            even NaN.
        samples: B sequences, T tokens.
        gamma: Discount per trained token.
        gae_lambda: 0 bootstraps from the value model only, 1 uses the rewards only.

    Returns:
        (advantages, returns), both [T] float64, 0 at untrained tokens.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.
    """
    trained_values = torch.where(samples.loss_mask, values.double(), 0.0)
    deltas = (
        token_rewards.double()
        + gamma * gather_next_trained(values, samples=samples)
        - trained_values
    )
    advantages = compute_discounted_sums(deltas, samples=samples, decay=gamma * gae_lambda)
    return advantages, torch.where(samples.loss_mask, advantages + trained_values, 0.0)


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
