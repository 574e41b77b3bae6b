"""GMPO: the geometric mean of a completion's clipped ratios in place of the arithmetic one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.surrogate import SurrogateObjective, clip_shares, sequence_mean


@register_objective("gmpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoObjective(SurrogateObjective):
    """One outlying token moves a geometric mean little.

    loss = -A * exp(mean over the completion of c_t), with c_t = min(log rho, clip(log rho, -clip_low, clip_high)) where A > 0 and the max
    of both where A < 0; it stands on every token of the completion, so that sequence_mean_token_mean gives the published loss. The clip
    is of the log-ratio: 0.4 on both sides in the paper.

    Source: Zhao et al. 2025, arXiv:2507.20673, equation 4.
    """

    clip_low: float = 0.4
    """log rho is clipped below at -clip_low."""
    clip_high: float = 0.4
    """log rho is clipped above at clip_high."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-A * exp(mean of the clipped log-ratios)."""
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high)
        held = torch.where(
            advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
        )
        return -advantages * sequence_mean(held, batch).exp()

    def held_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides."""
        is_low, is_high = log_ratio < -self.clip_low, log_ratio > self.clip_high
        return clip_shares(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )
