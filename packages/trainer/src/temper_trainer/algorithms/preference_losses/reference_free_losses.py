"""SimPO and ORPO: losses of pairs that need no reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temper_trainer.algorithms.preference_losses.preference_loss import PairLoss
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import NonNegativeFloat, PositiveFloat
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms.preference_losses.preference_loss import CompletionLogprobs


@variant("simpo")
class SimPo(PairLoss):
    """Simple preference optimization: the mean log-prob as reward, with a target margin.

        loss = -log sigmoid(beta * h - gamma)
        h = mean log p over the tokens of the chosen completion - that of the rejected one

    sft_coef times the chosen completion's mean negative log-likelihood is added.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6. The authors advise a gamma between 0 and
    beta, and sft_coef where a policy loses its abilities.
    """

    beta: PositiveFloat = 2.0
    """Scale of the rewards; larger than for dpo, because rewards are means over tokens."""
    gamma: NonNegativeFloat = 1.0
    """Margin that the chosen completion's reward should have over the rejected one's."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the chosen completion's negative log-likelihood per token."""

    @property
    def likelihood_coef(self) -> float:
        return self.sft_coef

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the completion's mean log-prob."""
        return logprobs.policy_mean

    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return -log sigmoid(beta * h - gamma)."""
        return -torch.nn.functional.logsigmoid(self.beta * difference - self.gamma)


@variant("orpo")
class Orpo(PairLoss):
    """Odds-ratio preference optimization: SFT on chosen completions, and a penalty on others.

        loss = -log P_c - beta * log sigmoid(log odds_c - log odds_r)
        log odds = log P - log(1 - P),  log P = mean log p over the tokens of the completion

    c is the chosen completion and r the rejected one.

    Source: Hong et al. 2024, arXiv:2403.07691, equations 4, 6 and 7.
    """

    beta: PositiveFloat = 0.1
    """Weight of the odds-ratio term, lambda in the paper."""

    @property
    def likelihood_coef(self) -> float:
        return 1.0

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the completion's log-odds."""
        # Below 0 by a float32 epsilon: P = 1, which dummy sequences also have, has infinite odds.
        mean = logprobs.policy_mean.clamp(max=-torch.finfo(torch.float32).eps)
        # log(1 - P), exact for P near 1.
        return mean - torch.log(-torch.expm1(mean))

    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return -beta * log sigmoid(log odds_c - log odds_r)."""
        return -self.beta * torch.nn.functional.logsigmoid(difference)
