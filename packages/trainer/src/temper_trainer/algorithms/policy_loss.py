"""The clipped policy objective of PPO and its kin, with entropy bonus and KL to a reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.surrogate import SurrogateObjective, clip_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedObjective(SurrogateObjective):
    """A surrogate with the ratio held to [1 - clip_low, 1 + clip_high]; what shares the fields and metrics of PPO's clip."""

    clip_low: float = 0.2
    """rho is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """rho is clipped above at 1 + clip_high."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-min(rho * A, clip(rho) * A)."""
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def held_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides."""
        ratio = log_ratio.exp()
        is_low, is_high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        return clip_shares(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )


@register_objective("ppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(ClippedObjective):
    """Clipped surrogate per trained token.

    With rho = exp(log p - log p_old) and advantage A:

        loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), and where A < 0 at most -dual_clip * A,
        less entropy_coef * H, plus kl_coef * KL(policy, reference).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025, arXiv:2503.14476, section 3.1; dual clip:
    Ye et al. 2020, arXiv:1912.09729, section 3.
    """

    dual_clip: float | None = None
    """Above 1; bounds the loss of a negative advantage, which is otherwise unbounded in rho. None is off."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Clipped, and bounded where the advantage is negative."""
        loss = ClippedObjective.surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    def held_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides, and of the dual clip where there is one."""
        found = ClippedObjective.held_metrics(self, log_ratio, advantages=advantages, batch=batch)
        if self.dual_clip is not None:
            found["policy/dual_clip_share"] = weighted_mean(
                (log_ratio.exp() > self.dual_clip) & (advantages < 0), batch.loss_mask
            )
        return found
