"""PF-PPO's filter: a step's completions are drawn again by their rewards, so that more is learned from those whose reward says most."""

import torch
from torch import Tensor

from temper_trainer.config.algorithm import ReweightConfig


def resample_by_reward(
    rewards: Tensor, *, group_ids: Tensor, config: ReweightConfig, seed: int
) -> Tensor:
    """Places of the completions that are trained on, with replacement, as many as there were.

    power: P(i) ~ |r_i|^exponent over the step; where every reward is 0 the completions stay as they are. max_min and max_random draw
    within each group as many as it has: half of the probability is on the best, half on the worst, or on any one of it; equals share.

    Args:
        rewards: [B] of each completion.
        group_ids: [B] completions of one prompt share it.
        config: method and exponent.
        seed: of the draw.

    Returns:
        [B] int64, ascending.

    Source: Shen and Zhang 2024, arXiv:2409.06957, section 3 (best-worst and best-random filters).
    """
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
    found = []
    for group in torch.unique(group_ids):
        members = torch.nonzero(group_ids == group)[:, 0]
        weights = _of_group(rewards[members], with_any=config.method == "max_random")
        found.append(
            members[torch.multinomial(weights, len(members), replacement=True, generator=generator)]
        )
    return torch.cat(found).sort().values


def _of_group(rewards: Tensor, *, with_any: bool) -> Tensor:
    """[G] probabilities within one group."""
    best = (rewards == rewards.max()).double()
    other = torch.ones_like(rewards) if with_any else (rewards == rewards.min()).double()
    return best / best.sum() / 2 + other / other.sum() / 2
