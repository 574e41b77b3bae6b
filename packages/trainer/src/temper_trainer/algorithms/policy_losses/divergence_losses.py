"""DPPO: a mask based on how much a token's probability changed, in place of ratio clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss, compute_clip_fractions
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import PositiveFloat, Range
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric

# 1 - p is computed from a rounded p, so for p near 1 it may be 0, and its logarithm infinite.
_MIN_REST = 1e-8


@variant("dppo")
class Dppo(PolicyLoss):
    """Policy gradient with a mask on tokens whose probability has moved too far.

        loss = -M * sg(min(rho, max_ratio)) * A * log p
        M = 0   if A > 0, p > p_old and D > clip_high
        M = 0   if A < 0, p < p_old and D > clip_low
        M = 1   otherwise

    sg is stop-gradient. D is the divergence between the policies of "this token" and "any other":

        tv:  |p - p_old|
        kl:  p_old * log(p_old / p) + (1 - p_old) * log((1 - p_old) / (1 - p))

    A ratio far from 1 at a rare token is a small divergence, so rare tokens keep their gradient.

    Source: Qi et al. 2026, arXiv:2602.04879, equations 13 (tv) and 14 (kl), and section 5.4 for
    max_ratio.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the two policies at a token: total variation or Kullback-Leibler."""
    clip_low: PositiveFloat = 0.15
    """Bound on the divergence where the advantage is negative and the probability has fallen. The
    authors use 0.15 with tv and 0.05 with kl.
    """
    clip_high: PositiveFloat = 0.15
    """Bound on the divergence where the advantage is positive and the probability has risen."""
    max_ratio: Annotated[float, Range(at_least=1)] = 20.0
    """Upper bound on the importance weight."""

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -M * sg(min(rho, max_ratio)) * A * log p; see the class for the symbols."""
        is_low, is_high = self._find_beyond_bound(log_ratio, logprobs=logprobs)
        is_masked = torch.where(advantages > 0, is_high, is_low & (advantages < 0))
        weight = log_ratio.detach().exp().clamp(max=self.max_ratio)
        return -torch.where(is_masked, 0.0, weight * advantages) * logprobs

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the fractions of masked tokens with negative and with positive advantage."""
        # The old log-probs, because the metrics receive no others: log p = log p_old + log rho.
        old = torch.where(batch.loss_mask, batch.columns["old_logprobs"], 0.0)
        is_low, is_high = self._find_beyond_bound(log_ratio, logprobs=old + log_ratio)
        return compute_clip_fractions(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )

    def _find_beyond_bound(self, log_ratio: Tensor, *, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T] bool each: the probability has fallen, and has risen, beyond its bound."""
        log_ratio, logprobs = log_ratio.detach(), logprobs.detach()
        p, p_old = logprobs.exp(), (logprobs - log_ratio).exp()
        if self.divergence == "tv":
            distance = (p - p_old).abs()
        else:
            rest, rest_old = (1 - p).clamp(min=_MIN_REST), (1 - p_old).clamp(min=_MIN_REST)
            distance = -p_old * log_ratio + rest_old * (rest_old / rest).log()
        return (
            (p < p_old) & (distance > self.clip_low),
            (p > p_old) & (distance > self.clip_high),
        )
