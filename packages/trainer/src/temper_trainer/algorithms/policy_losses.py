"""Policy losses: the base class of all of them, and PPO, GSPO, CISPO, GMPO and SAPO.

`SurrogateObjective` computes the ratio and adds entropy bonus, KL loss and correction weights; a
subclass returns the per-token surrogate.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, KlEstimator, estimate_kl
from temper_trainer.algorithms.rollout_correction import compute_mismatch_metrics

CORRECTION_WEIGHTS = "correction_weights"
"""Name of the [T] float32 column of importance weights from ``compute_rollout_correction``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateObjective(Objective):
    """Base class of policy losses; a subclass implements ``surrogate``.

        loss = w * surrogate - entropy_coef * H + kl_coef * KL(policy, reference)

    per trained token. The correction weights w apply only to the surrogate.
    """

    always_needs_old_logprobs: ClassVar[bool] = False
    """True if it reads old_logprobs even if a step makes only one update."""
    prepared_columns: ClassVar[frozenset[str]] = frozenset()
    """Names of the columns that ``prepare`` returns."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 skips computing the entropy unless ``reports_entropy`` is set.
    """
    kl_coef: float = 0.0
    """Weight of KL(policy, reference); above 0 it reads ref_logprobs."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL in the loss, k2 or k3: k1 has zero expected gradient."""
    kl_clamp: float | None = None
    """Bound on the k3 estimate of a token in nats, without gradient beyond it; None is off."""
    old_is_current: bool = False
    """True if the step makes one update and no pass measured old_logprobs.

    Then rho is exactly 1 and its gradient is that of log p. Ratio metrics would be constants and
    are not reported; the mismatch to rollout_logprobs is reported in their place.
    """
    uses_correction_weights: bool = False
    """True to multiply the surrogate with the column correction_weights."""
    reports_entropy: bool = False
    """True to measure the entropy even if it has no weight."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError("kl_estimator k1 in a loss has zero expected gradient: use k2 or k3.")

    @abstractmethod
    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the surrogate losses [T] to minimize.

        Args:
            log_ratio: [T] ``log p - log p_old`` with gradient, clamped, 0 at untrained tokens; see
                ``effective_log_ratio``.
            logprobs: [T] of the policy with gradient, 0 at untrained tokens.
            advantages: [T], 0 at untrained tokens.
            batch: The micro-batch.
        """

    def effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the log-ratio [T] to use in the surrogate; by default each token's own."""
        return log_ratio

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return clip-fraction metrics; empty by default."""
        return {}

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs, and the entropy if it has a weight or is reported."""
        return frozenset(
            {HeadOutput.LOGPROB, HeadOutput.ENTROPY}
            if self.entropy_coef or self.reports_entropy
            else {HeadOutput.LOGPROB}
        )

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the batch that the loss reads, given its settings."""
        read = {"advantages", "rollout_logprobs" if self.old_is_current else "old_logprobs"}
        read |= self.prepared_columns | ({"ref_logprobs"} if self.kl_coef else set())
        return frozenset(read | {CORRECTION_WEIGHTS} if self.uses_correction_weights else read)

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch and its metrics."""
        mask = batch.loss_mask
        # Mask before any arithmetic: with where() afterwards the gradient would be 0 * NaN = NaN.
        logprobs = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        advantages = torch.where(mask, batch.columns["advantages"], 0.0)
        old = (
            logprobs.detach()
            if self.old_is_current
            else torch.where(mask, batch.columns["old_logprobs"], 0.0)
        )
        # Clamped before exp: an infinite ratio times an advantage of 0 would be NaN.
        log_ratio = self.effective_log_ratio(
            (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), batch
        )
        loss = self.surrogate(log_ratio, logprobs=logprobs, advantages=advantages, batch=batch)
        if self.uses_correction_weights:
            loss = loss * torch.where(mask, batch.columns[CORRECTION_WEIGHTS], 0.0)
        metrics = (
            compute_mismatch_metrics(
                old, rollout_logprobs=batch.columns["rollout_logprobs"], loss_mask=mask
            )
            if self.old_is_current
            else _ratio_metrics(log_ratio.detach(), mask)
            | self.clip_metrics(log_ratio.detach(), advantages=advantages, batch=batch)
        )
        if HeadOutput.ENTROPY in self.required_outputs:
            entropy = torch.where(mask, head_outputs[HeadOutput.ENTROPY], 0.0)
            loss = loss - self.entropy_coef * entropy if self.entropy_coef else loss
            metrics["policy/entropy"] = weighted_mean(entropy, mask)
        if self.kl_coef:
            reference = torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            kl = estimate_kl(
                logprobs,
                ref_logprobs=reference,
                estimator=self.kl_estimator,
                clamp=self.kl_clamp,
            )
            loss = loss + self.kl_coef * kl
            metrics["policy/ref_kl"] = weighted_mean(kl, mask)
        return LossTerms(loss=loss, metrics=metrics)


def compute_sequence_mean(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return the mean of a column [T] over its sequence's trained tokens, repeated on every token.

    Gradients flow through the mean.
    """
    mask = batch.loss_mask
    # At least 1, because a dummy sequence has no trained token.
    trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
    mean = sum_per_sequence(torch.where(mask, column, 0.0), batch) / trained
    return mean[batch.sequence_index]


def compute_clip_fractions(
    *, is_low: Tensor, is_high: Tensor, advantages: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Return the fractions of trained tokens whose gradient the low and the high clip remove.

    The low clip removes the gradient of tokens below the clip range with a negative advantage. The
    high clip removes that of tokens above the range with a positive advantage.
    """
    return {
        "policy/clip_fraction_low": weighted_mean(is_low & (advantages < 0), mask),
        "policy/clip_fraction_high": weighted_mean(is_high & (advantages > 0), mask),
    }


def _ratio_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    ratio = log_ratio.exp()
    return {
        "policy/ratio_mean": weighted_mean(ratio, mask),
        "policy/ratio_error_max": Metric(
            value=torch.where(mask, (ratio - 1.0).abs(), 0.0).max(), reduction="max"
        ),
        # The k3 estimate of KL(old, current), which unlike the mean log-ratio is never negative.
        "policy/old_kl": weighted_mean(ratio - 1.0 - log_ratio, mask),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedObjective(SurrogateObjective):
    """Policy loss that clips the ratio to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    """rho is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """rho is clipped above at 1 + clip_high."""

    def surrogate(
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


@register_objective("ppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class PpoObjective(ClippedObjective):
    """PPO's clipped loss per trained token.

    With rho = exp(log p - log p_old) and advantage A:

        loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)
        loss = min(loss, -dual_clip * A)   if A < 0 and dual_clip is set

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025,
    arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2020, arXiv:1912.09729, section 3.
    """

    dual_clip: float | None = None
    """Above 1: bound on the loss of negative advantages, which otherwise grows with rho. None is
    off.
    """

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the clipped loss, bounded where the advantage is negative."""
        # Not super(): with slots=True the dataclass decorator replaces the class that it refers to.
        loss = ClippedObjective.surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the clip fractions of both sides and of the dual clip, if there is one."""
        metrics = ClippedObjective.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        if self.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = weighted_mean(
                (log_ratio.exp() > self.dual_clip) & (advantages < 0), batch.loss_mask
            )
        return metrics


@register_objective("gspo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GspoObjective(ClippedObjective):
    """PPO's clip on the geometric mean of a completion's ratios.

        s = exp(mean over the completion of (log p - log p_old))
        s_t = sg(s) * p_t / sg(p_t)
        loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)

    sg is stop-gradient; s_t lets advantages differ within a completion. With
    sequence_mean_token_mean and equal advantages this is the published sequence-level loss and its
    gradient. The paper's clips are small: 3e-4 and 4e-4.

    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7, 13 and 14 (GSPO-token).
    """

    def effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the completion's mean log-ratio in value, with each token's own gradient."""
        # The second summand is 0 and has gradient 1: every token gets the gradient of the common
        # ratio.
        return compute_sequence_mean(log_ratio, batch).detach() + (log_ratio - log_ratio.detach())


@register_objective("cispo")
@dataclass(frozen=True, slots=True, kw_only=True)
class CispoObjective(ClippedObjective):
    """REINFORCE with a clipped importance weight: every token keeps its gradient.

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log p

    sg is stop-gradient. With clip_low = 1 only the upper side is clipped, as in the paper.

    Source: MiniMax 2025, arXiv:2506.13585, equations 4 and 5.
    """

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -sg(clip(rho)) * A * log p."""
        weight = log_ratio.detach().exp().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight * advantages * logprobs


@register_objective("gmpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoObjective(SurrogateObjective):
    """Geometric mean of a completion's clipped ratios, which is robust to single outlier tokens.

        c_t = min(log rho_t, clip(log rho_t, -clip_low, clip_high))   if A > 0, else max of both
        loss = -A * exp(mean over the completion of c_t)

    Every token of the completion has this loss, so sequence_mean_token_mean gives the published
    loss. The log-ratio is clipped, not the ratio; the paper uses 0.4 on both sides.

    Source: Zhao et al. 2025, arXiv:2507.20673, equation 4.
    """

    clip_low: float = 0.4
    """log rho is clipped below at -clip_low."""
    clip_high: float = 0.4
    """log rho is clipped above at clip_high."""

    def surrogate(
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


@register_objective("sapo")
@dataclass(frozen=True, slots=True, kw_only=True)
class SapoObjective(SurrogateObjective):
    """Soft gate on the ratio: a token's gradient decays smoothly with the distance of rho from 1.

        loss = -(4 / tau) * sigmoid(tau * (rho - 1)) * A

    tau differs for positive and other advantages. At rho = 1 the gradient equals that of -rho * A
    for every tau.

    Source: Gao et al. 2025, arXiv:2511.20347, section 3.
    """

    positive_temperature: float = 1.0
    """tau where A > 0."""
    negative_temperature: float = 1.05
    """tau where A <= 0.

    The paper makes it larger than positive_temperature, because negative advantages raise the
    logits of many unsampled tokens.
    """

    def __post_init__(self) -> None:
        SurrogateObjective.__post_init__(self)
        if min(self.positive_temperature, self.negative_temperature) <= 0:
            raise ConfigError(
                f"the temperatures of sapo are {self.positive_temperature} and "
                f"{self.negative_temperature}, but must be above 0."
            )

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the soft gate times the advantage."""
        tau = torch.where(advantages > 0, self.positive_temperature, self.negative_temperature)
        # The slope of the sigmoid at 0 is 1 / 4, so the factor makes the gradient at rho = 1 that
        # of rho.
        return -(4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * advantages
