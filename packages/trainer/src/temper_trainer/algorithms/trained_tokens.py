"""Scans along the trained tokens of each sample, which need not be contiguous: tool and observation spans lie between them.

A reward that comes after such a span belongs to the decisions before it, so "next" always means the next trained token.
"""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.reduction import trained_sequences


def outcome_at_last_token(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """[T] float64: each sample's reward [B] at its last trained token, 0 elsewhere; a sample without trained tokens has no place for it."""
    column = torch.zeros(samples.num_tokens, dtype=torch.float64)
    place = torch.nonzero(samples.loss_mask)[:, 0]
    last = torch.zeros(samples.num_sequences, dtype=torch.long)
    last.scatter_reduce_(0, samples.sequence_index[place], place, reduce="amax", include_self=False)
    trained = trained_sequences(samples)
    column[last[trained]] = rewards.double()[trained]
    return column


def discounted_sums(column: Tensor, *, samples: SequenceBatch, decay: float) -> Tensor:
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


def at_next_trained(column: Tensor, *, samples: SequenceBatch) -> Tensor:
    """[T] float64: at each trained token the column's entry at the sample's next trained token, 0 after the last; 0 at untrained tokens."""
    place = torch.nonzero(samples.loss_mask)[:, 0]
    owner = samples.sequence_index[place]
    following = column.double()[place].roll(-1)
    is_same = (owner == owner.roll(-1)) & (torch.arange(len(place)) < len(place) - 1)
    result = column.new_zeros(samples.num_tokens, dtype=torch.float64)
    return result.index_copy(0, place, torch.where(is_same, following, 0.0))
