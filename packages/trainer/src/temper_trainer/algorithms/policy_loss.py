"""The clipped policy objective of PPO and its kin, with entropy bonus and KL to a reference."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import Aggregation, Answers, LossTerms, Objective, Query, register_objective
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, KlEstimator, estimate_kl
from temper_trainer.algorithms.mismatch import mismatch_metrics


@register_objective("ppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(Objective):
    """Clipped surrogate per trained token.

    With rho = exp(log p - log p_old) and advantage A:

        loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), and where A < 0 at most -dual_clip * A,
        less entropy_coef * H, plus kl_coef * KL(policy, reference).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025, arXiv:2503.14476, section 3.1; dual clip:
    Ye et al. 2020, arXiv:1912.09729, section 3.
    """

    clip_low: float = 0.2
    """rho is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """rho is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Above 1; bounds the loss of a negative advantage, which is otherwise unbounded in rho. None is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy; 0 never computes it."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; above 0 reads ref_logprobs."""
    kl_estimator: KlEstimator = "k3"
    """k2 or k3."""
    old_is_current: bool = False
    """The step makes one update, so the policy before it is the policy itself: rho is exactly 1, its gradient that of log p, and no pass
    measures old_logprobs. Ratio metrics would then be constants and are not reported; the mismatch to rollout_logprobs is, here."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError("kl_estimator k1 in a loss has zero expected gradient: use k2 or k3.")

    @property
    def needs(self) -> frozenset[Query]:
        """Log-probs, and the entropy where it has a weight."""
        return frozenset({Query.LOGPROB, Query.ENTROPY} if self.entropy_coef else {Query.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        """advantages; old_logprobs, or rollout_logprobs for the mismatch; ref_logprobs where the KL has a weight."""
        read = {"advantages", "rollout_logprobs" if self.old_is_current else "old_logprobs"}
        return frozenset(read | {"ref_logprobs"} if self.kl_coef else read)

    def __call__(self, answers: Answers, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        mask = batch.loss_mask
        # Masked before any arithmetic: where() afterwards would still send 0 * NaN into the gradient.
        logprobs = torch.where(mask, answers[Query.LOGPROB], 0.0)
        advantages = torch.where(mask, batch.columns["advantages"], 0.0)
        old = logprobs.detach() if self.old_is_current else torch.where(mask, batch.columns["old_logprobs"], 0.0)
        log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss = self._surrogate(log_ratio.exp(), advantages)
        metrics = (
            mismatch_metrics(old, rollout_logprobs=batch.columns["rollout_logprobs"], loss_mask=mask)
            if self.old_is_current
            else self._ratio_metrics(log_ratio.detach(), advantages, mask)
        )
        if self.entropy_coef:
            entropy = torch.where(mask, answers[Query.ENTROPY], 0.0)
            loss = loss - self.entropy_coef * entropy
            metrics["policy/entropy"] = weighted_mean(entropy, mask)
        if self.kl_coef:
            reference = torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            kl = estimate_kl(logprobs, ref_logprobs=reference, estimator=self.kl_estimator)
            loss = loss + self.kl_coef * kl
            metrics["policy/ref_kl"] = weighted_mean(kl, mask)
        return LossTerms(loss=loss, metrics=metrics)

    def _surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self.dual_clip * advantages), gain)
        return -gain

    def _ratio_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Metric]:
        ratio = log_ratio.exp()
        is_low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        is_high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        found = {
            "policy/ratio_mean": weighted_mean(ratio, mask),
            "policy/ratio_error_max": Metric(value=torch.where(mask, (ratio - 1.0).abs(), 0.0).max(), reduction="max"),
            "policy/clip_share_low": weighted_mean(is_low, mask),
            "policy/clip_share_high": weighted_mean(is_high, mask),
            "policy/old_kl": weighted_mean(ratio - 1.0 - log_ratio, mask),
        }
        if self.dual_clip is not None:
            found["policy/dual_clip_share"] = weighted_mean((ratio > self.dual_clip) & (advantages < 0), mask)
        return found
