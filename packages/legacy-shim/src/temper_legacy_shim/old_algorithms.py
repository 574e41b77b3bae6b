"""Advantages and losses of the old trainers that the new one has no name for, by import path.

Translated configurations name them in ``algorithm.advantage`` and ``algorithm.policy_loss``. The
losses are per token and unreduced, as every objective's are: only their formula is the old one, not
how micro-batches were averaged.
"""

from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.settings.variants import settings

EPSILON = 1e-8
"""Keeps a logarithm finite, as the old loss did."""


def bare_reward(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    """Return the reward of each completion as the advantage.

    The old group estimators did this if a prompt had a single completion.

    Args:
        rewards: [B].
        samples: the B sequences; not read.

    Returns:
        [B] the rewards.

    Source: verl v0.7.0, verl/trainer/ppo/core_algos.py: a group of one has mean 0 and deviation 1.
    """
    return rewards


@settings
class PlainGradient(PolicyLoss):
    """-A log p per trained token, whatever the ratio to the old policy; nothing is clipped.

    Source: Chu et al. 2025, arXiv:2504.02546; verl's loss_mode gpg.
    """

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        return -advantages * logprobs


@settings
class WithinDivergence(PolicyLoss):
    """-A min(rho, max_ratio) log p, rho without gradient.

    Tokens that moved too far in the direction of A are dropped.

    Source: verl v0.7.1, loss_mode dppo_tv and dppo_kl.
    """

    distance: Literal["tv", "kl"] = "tv"
    """tv: the change of the token's probability. kl: KL(old, new) of "this token or another one".
    """
    low: float = 0.2
    """Largest fall of the probability of a token with A <= 0."""
    high: float = 0.2
    """Largest rise of the probability of a token with A > 0."""
    max_ratio: float = 3.0
    """rho weighs at most this much."""

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the weighted log-probs of the tokens that are kept."""
        ratio = log_ratio.detach().exp()
        is_over, is_under = self._moved(logprobs.detach(), (logprobs - log_ratio).detach())
        is_kept = ~torch.where(advantages > 0, is_over, is_under)
        return -advantages * ratio.clamp(max=self.max_ratio) * is_kept * logprobs

    def _moved(self, logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T] whether a token rose above ``high``, and whether it fell below ``low``."""
        new, old = logprobs.exp(), old_logprobs.exp()
        if self.distance == "tv":
            return new - old > self.high, new - old < -self.low
        rest = (1 - old) * ((1 - old + EPSILON).log() - (1 - new + EPSILON).log())
        divergence = old * (old_logprobs - logprobs) + rest
        return (divergence > self.high) & (new > old), (divergence > self.low) & (new < old)
