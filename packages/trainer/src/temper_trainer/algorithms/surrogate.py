"""Base class of the policy losses: ratio, entropy bonus, KL loss, correction weights, metrics."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, LossTerms, Objective
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
    """k2 or k3."""
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
            kl = estimate_kl(logprobs, ref_logprobs=reference, estimator=self.kl_estimator)
            loss = loss + self.kl_coef * kl
            metrics["policy/ref_kl"] = weighted_mean(kl, mask)
        return LossTerms(loss=loss, metrics=metrics)


def compute_sequence_mean(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return the mean of a column [T] over its sequence's trained tokens, repeated on every token.

    Gradients flow through the mean.
    """
    mask = batch.loss_mask
    trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
    mean = sum_per_sequence(torch.where(mask, column, 0.0), batch) / trained
    return mean[batch.sequence_index]


def compute_clip_fractions(
    *, is_low: Tensor, is_high: Tensor, advantages: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Return the fractions of trained tokens whose gradient the clip removes, for each side.

    That is below the clip with a negative advantage, or above it with a positive one.
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
        "policy/old_kl": weighted_mean(ratio - 1.0 - log_ratio, mask),
    }
