"""DPO, IPO and hinge: losses of pairs that compare the policy with a reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from temper_trainer.algorithms.preference_losses.preference_loss import (
    PairLoss,
    ReferenceSource,
)
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import NonNegativeFloat, PositiveFloat, Range
from temper_trainer.settings.variants import settings, variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms.preference_losses.preference_loss import CompletionLogprobs


@settings
class LogRatioLoss(PairLoss):
    """Loss for a pair's difference h in log(p / ref).

    sft_coef times the chosen completion's mean negative log-likelihood is added (Pang et al. 2024,
    arXiv:2404.19733).
    """

    beta: PositiveFloat = 0.1
    """Strength of the regularization toward the reference policy."""
    reference: ReferenceSource = "ref"
    """ref: the ref role; disabled_adapter: the actor without its adapter; none: no reference, its
    log-probs count as 0.
    """
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the chosen completion's negative log-likelihood per token."""

    @property
    def likelihood_coef(self) -> float:
        return self.sft_coef

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the sum of log(p / ref) over the completion."""
        return logprobs.log_ratio


@settings
class SumOrMeanLoss(LogRatioLoss):
    """Apply the loss to sums over completions, or to means."""

    length_normalized: bool = False
    """True to use means over a completion's tokens in place of sums."""

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the sum of log(p / ref) over the completion, or its mean."""
        total = logprobs.log_ratio
        return total / logprobs.num_tokens if self.length_normalized else total


@variant("dpo")
class Dpo(SumOrMeanLoss):
    """Direct preference optimization.

        loss = -(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h)
        h = sum log(p / ref) of the chosen completion - that of the rejected one

    with e = label_smoothing.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing: Mitchell 2023, "A
    note on DPO with noisy preferences".
    """

    label_smoothing: Annotated[float, Range(at_least=0, at_most=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels, in [0, 0.5]."""

    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return the smoothed -log sigmoid(beta * h)."""
        log_sigmoid, scaled = torch.nn.functional.logsigmoid, self.beta * difference
        loss = -(1.0 - self.label_smoothing) * log_sigmoid(scaled)
        return loss - self.label_smoothing * log_sigmoid(-scaled)


@variant("hinge")
class Hinge(SumOrMeanLoss):
    """SLiC-HF's hinge loss on the log-ratios of DPO.

        loss = max(0, 1 - beta * h)

    h as for ``dpo``.

    Source: Zhao et al. 2023, arXiv:2305.10425.
    """

    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return max(0, 1 - beta * h)."""
        return torch.relu(1.0 - self.beta * difference)


@variant("ipo")
class Ipo(LogRatioLoss):
    """IPO: a square in place of the sigmoid, so that the difference stays finite.

        loss = (h - 1 / (2 * beta))^2

    h is the difference between the two completions in the mean of log(p / ref) over tokens.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17.
    """

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the mean of log(p / ref) over the completion."""
        return logprobs.log_ratio / logprobs.num_tokens

    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return (h - 1 / (2 * beta))^2."""
        return (difference - 1.0 / (2.0 * self.beta)).square()
