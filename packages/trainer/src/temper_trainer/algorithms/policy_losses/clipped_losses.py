"""PPO, GSPO, CISPO, GMPO and SAPO: policy losses that bound the ratio of a token or completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from temper_trainer.algorithms.policy_losses.policy_loss import (
    PolicyLoss,
    compute_clip_fractions,
    compute_sequence_mean,
)
from temper_trainer.settings.lazy_torch import compute_weighted_mean, torch
from temper_trainer.settings.ranges import NonNegativeFloat, PositiveFloat, Range
from temper_trainer.settings.variants import settings, variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric


@settings
class ClippedLoss(PolicyLoss):
    """Policy loss that clips the ratio to [1 - clip_low, 1 + clip_high]."""

    clip_low: NonNegativeFloat = 0.2
    """rho is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """rho is clipped above at 1 + clip_high."""

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -min(rho * A, clip(rho) * A)."""
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        # The minimum removes the gradient only where the ratio has already moved beyond the clip in
        # the direction of the advantage; a move in the wrong direction is still corrected.
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the clip fractions of both sides."""
        ratio = log_ratio.exp()
        is_low, is_high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        return compute_clip_fractions(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )


@variant("ppo")
class Ppo(ClippedLoss):
    """PPO's clipped loss per trained token.

    With rho = exp(log p - log p_old) and advantage A:

        loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)
        loss = min(loss, -dual_clip * A)   if A < 0 and dual_clip is set

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025,
    arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2020, arXiv:1912.09729, section 3.
    """

    dual_clip: Annotated[float, Range(above=1)] | None = None
    """Above 1: bound on the loss of negative advantages, which otherwise grows with rho. None is
    off.
    """

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the clipped loss, bounded where the advantage is negative."""
        # super() does not work here: with slots=True the decorator replaces the class that it
        # refers to.
        loss = ClippedLoss.compute_surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the clip fractions for both sides and the dual clip, if there is one."""
        metrics = ClippedLoss.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        if self.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = compute_weighted_mean(
                (log_ratio.exp() > self.dual_clip) & (advantages < 0), batch.loss_mask
            )
        return metrics


@variant("gspo")
class Gspo(Ppo):
    """PPO's loss with the geometric mean of a completion's ratios.

        s = exp(mean over the completion of (log p - log p_old))
        s_t = sg(s) * p_t / sg(p_t)
        loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)
        loss_t = min(loss_t, -dual_clip * A_t)   if A_t < 0 and dual_clip is set

    sg is stop-gradient; s_t has the value of s and a gradient for token t alone, so that each token
    can have its own advantage. With sequence_mean_token_mean and equal advantages this is the
    published sequence-level loss and its gradient.

    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7, 13 and 14 (GSPO-token);
    the dual clip as in `Ppo`.
    """

    published_aggregation: ClassVar[str | None] = "sequence_mean_token_mean"

    clip_low: NonNegativeFloat = 3e-4
    """The completion's ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The completion's ratio is clipped above at 1 + clip_high."""

    def compute_effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the completion's mean log-ratio in value, with each token's own gradient."""
        # The second summand adds nothing to the value, but gives each token's log-prob the gradient
        # 1.
        return compute_sequence_mean(log_ratio, batch).detach() + (log_ratio - log_ratio.detach())


@variant("cispo")
class Cispo(ClippedLoss):
    """REINFORCE with a clipped importance weight: every token keeps its gradient.

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log p

    sg is stop-gradient.

    Source: MiniMax 2025, arXiv:2506.13585, equations 4 and 5.
    """

    clip_low: NonNegativeFloat = 1.0
    """rho is clipped below at 1 - clip_low; 1 does not clip that side, as in the paper."""
    clip_high: NonNegativeFloat = 4.0
    """rho is clipped above at 1 + clip_high."""

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -sg(clip(rho)) * A * log p."""
        weight = log_ratio.detach().exp().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight * advantages * logprobs


@variant("gmpo")
class Gmpo(PolicyLoss):
    """Geometric mean of a completion's clipped ratios; robust to single outlier tokens.

        c_t = min(log rho_t, clip(log rho_t, -clip_low, clip_high))   if A > 0, else max of both
        loss = -A * exp(mean over the completion of c_t)

    Every token of the completion has this loss, so sequence_mean_token_mean gives the published
    loss. The log-ratio is clipped, not the ratio; the paper uses 0.4 on both sides.

    Source: Zhao et al. 2025, arXiv:2507.20673, equation 4.
    """

    published_aggregation: ClassVar[str | None] = "sequence_mean_token_mean"

    clip_low: NonNegativeFloat = 0.4
    """log rho is clipped below at -clip_low."""
    clip_high: NonNegativeFloat = 0.4
    """log rho is clipped above at clip_high."""

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -A * exp(mean of the clipped log-ratios)."""
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high)
        bounded = torch.where(
            advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
        )
        return -advantages * compute_sequence_mean(bounded, batch).exp()

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the clip fractions of both sides."""
        is_low, is_high = log_ratio < -self.clip_low, log_ratio > self.clip_high
        return compute_clip_fractions(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )


@variant("sapo")
class Sapo(PolicyLoss):
    """Soft gate on the ratio: a token's gradient decays smoothly with the distance of rho from 1.

        loss = -(4 / tau) * sigmoid(tau * (rho - 1)) * A

    tau differs for positive and other advantages. At rho = 1 the gradient is the same as for -rho *
    A, for every tau.

    Source: Gao et al. 2025, arXiv:2511.20347, section 3.
    """

    published_aggregation: ClassVar[str | None] = "sequence_mean_token_mean"

    positive_temperature: PositiveFloat = 1.0
    """tau where A > 0."""
    negative_temperature: PositiveFloat = 1.05
    """tau where A <= 0.

    The paper makes it larger than positive_temperature, because negative advantages raise the
    logits of many unsampled tokens.
    """

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the soft gate times the advantage."""
        tau = torch.where(advantages > 0, self.positive_temperature, self.negative_temperature)
        # The slope of the sigmoid at 0 is 1 / 4. The factor 4 / tau therefore makes the slope at
        # rho = 1 equal to 1, like rho's own.
        return -(4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * advantages
