"""PF-PPO's filter: resample a step's completions by their rewards.

Completions with informative rewards are trained on more often.
"""

import torch
from torch import Tensor

from temper_trainer.config.algorithm import ReweightConfig


def resample_by_reward(
    rewards: Tensor, *, group_ids: Tensor, config: ReweightConfig, seed: int
) -> Tensor:
    """Draw as many completions as there are, with replacement, and return their indices.

        power:       P(i) proportional to |r_i|^exponent over the step
        max_min:     within each group, half of the probability on the best, half on the worst
        max_random:  within each group, half of the probability on the best, half on all

    With power and only zero rewards the completions are kept as they are. Ties divide their
    probability equally. max_min and max_random draw as many completions from each group as it has.

    Args:
        rewards: [B] of each completion.
        group_ids: [B] equal for the completions of one prompt.
        config: Method and exponent.
        seed: Seed of the draw.

    Returns:
        [B] int64 indices, ascending.

    Source: Shen and Zhang 2024, arXiv:2409.06957, section 3 (best-worst and best-random filters).
    """
    # Its own generator: a draw from the global one would shift all later random numbers of the
    # process.
    generator = torch.Generator().manual_seed(seed)
    rewards = rewards.double()
    if config.method == "power":
        weights = rewards.abs() ** config.exponent
        if not bool(weights.sum() > 0):
            return torch.arange(len(rewards))
        return (
            torch.multinomial(weights, len(rewards), replacement=True, generator=generator)
            .sort()
            .values
        )
    indices = []
    for group in torch.unique(group_ids):
        members = torch.nonzero(group_ids == group)[:, 0]
        weights = _group_probabilities(rewards[members], includes_all=config.method == "max_random")
        indices.append(
            members[torch.multinomial(weights, len(members), replacement=True, generator=generator)]
        )
    return torch.cat(indices).sort().values


def _group_probabilities(rewards: Tensor, *, includes_all: bool) -> Tensor:
    """Return [G] the sampling probabilities within one group."""
    # In a group of equal rewards all completions are best and worst, so the draw is uniform.
    best = (rewards == rewards.max()).double()
    other = torch.ones_like(rewards) if includes_all else (rewards == rewards.min()).double()
    return best / best.sum() / 2 + other / other.sum() / 2
