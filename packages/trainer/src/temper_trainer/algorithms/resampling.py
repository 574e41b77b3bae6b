"""PF-PPO's filter: resample a step's completions by their rewards.

Completions with informative rewards are trained on more often.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import NonNegativeFloat
from temper_trainer.settings.variants import Variant, variant

if TYPE_CHECKING:
    from torch import Tensor


class Reweighting(Variant):
    """PF-PPO: resample a step's completions by their rewards, with replacement.

    The number of completions stays the same. An alternative of ``algorithm.reweight`` is a class
    with the decorator ``variant(name)``; its fields are its settings.

    Source: Shen and Zhang 2024, arXiv:2409.06957, section 3 (best-worst and best-random filters).
    """

    __slots__ = ()
    default_name: ClassVar[str | None] = "power"
    draws_by_group: ClassVar[bool] = True
    """True to draw as many completions from each group as it has, False to draw from the step."""

    @abstractmethod
    def weigh(self, rewards: Tensor) -> Tensor:
        """Return sampling weights, given the float64 rewards for a group or the step."""


@variant("power")
class Power(Reweighting):
    """Probability proportional to |reward| ** exponent, over the step."""

    draws_by_group: ClassVar[bool] = False

    exponent: NonNegativeFloat = 2.0
    """Exponent of the absolute reward."""

    def weigh(self, rewards: Tensor) -> Tensor:
        """Return |r|^exponent."""
        return rewards.abs() ** self.exponent


@variant("max_min")
class MaxMin(Reweighting):
    """Half of each group's probability on its best completion, half on its worst."""

    def weigh(self, rewards: Tensor) -> Tensor:
        """Return the probabilities; ties divide theirs equally."""
        return _halve(rewards == rewards.max(), rewards == rewards.min())


@variant("max_random")
class MaxRandom(Reweighting):
    """Half of each group's probability on its best completion, half on all."""

    def weigh(self, rewards: Tensor) -> Tensor:
        """Return the probabilities; ties divide theirs equally."""
        return _halve(rewards == rewards.max(), torch.ones_like(rewards))


def _halve(*parts: Tensor) -> Tensor:
    """Return the mean of uniform distributions over two parts, given as masks."""
    first, second = (part.double() / part.sum() / 2 for part in parts)
    return first + second


def resample_by_reward(
    rewards: Tensor, *, group_ids: Tensor, config: Reweighting, seed: int
) -> Tensor:
    """Draw as many completions as there are, with replacement, and return their indices.

    Where all weights are 0, the completions are kept as they are.

    Args:
        rewards: [B] reward per completion.
        group_ids: [B] equal for all completions of a prompt.
        config: Gives the weights.
        seed: Seed of the draw.

    Returns:
        [B] int64 indices, ascending.
    """
    # Its own generator: drawing from the global one would shift all later random numbers in the
    # process.
    generator = torch.Generator().manual_seed(seed)
    pools = group_ids if config.draws_by_group else torch.zeros_like(group_ids)
    indices = []
    for pool in torch.unique(pools):
        members = torch.nonzero(pools == pool)[:, 0]
        weights = config.weigh(rewards[members].double())
        if bool(weights.sum() > 0):
            drawn = torch.multinomial(weights, len(members), replacement=True, generator=generator)
            members = members[drawn]
        indices.append(members)
    return torch.cat(indices).sort().values
