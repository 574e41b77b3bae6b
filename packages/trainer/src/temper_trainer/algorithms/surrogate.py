"""What the policy objectives share: ratio to the old policy, entropy bonus, KL to a reference, correction weights, metrics."""

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
"""Name of the [T] float32 column that ``rollout_correction`` makes and surrogates are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateObjective(Objective):
    """A surrogate per trained token, less entropy_coef * H, plus kl_coef * KL(policy, reference).

    A subclass says what the surrogate is. Only the surrogate is multiplied with correction weights.
    """

    always_needs_old_logprobs: ClassVar[bool] = False
    """Whether it reads old_logprobs even in a step of one update."""
    prepared_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns that ``prepare`` makes."""

    entropy_coef: float = 0.0
    """Weight of the entropy; 0 never computes it."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; above 0 reads ref_logprobs."""
    kl_estimator: KlEstimator = "k3"
    """k2 or k3."""
    old_is_current: bool = False
    """The step makes one update, so the policy before it is the policy itself: rho is exactly 1, its gradient that of log p, and no pass
    measures old_logprobs. Ratio metrics would then be constants and are not reported; the mismatch to rollout_logprobs is, here."""
    uses_correction_weights: bool = False
    """Whether surrogates are multiplied with the column correction_weights."""
    reports_entropy: bool = False
    """Whether the entropy is measured where it has no weight: for a controller, or for the log."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError("kl_estimator k1 in a loss has zero expected gradient: use k2 or k3.")

    @abstractmethod
    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """[T] losses to minimise.

        Args:
            log_ratio: [T] ``log p - log p_old`` with gradient, clamped, 0 at untrained tokens; see ``effective_log_ratio``.
            logprobs: [T] of the policy with gradient, 0 at untrained tokens.
            advantages: [T], 0 at untrained tokens.
            batch: the micro-batch.
        """

    def effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """[T] what is clipped: each token's own log-ratio, unless a subclass says otherwise."""
        return log_ratio

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """How often the surrogate held a token back; by default nothing."""
        return {}

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs, and the entropy where it has a weight or is watched."""
        return frozenset(
            {HeadOutput.LOGPROB, HeadOutput.ENTROPY}
            if self.entropy_coef or self.reports_entropy
            else {HeadOutput.LOGPROB}
        )

    @property
    def columns(self) -> frozenset[str]:
        """advantages; old_logprobs, or rollout_logprobs for the mismatch; ref_logprobs and correction_weights where they are used."""
        read = {"advantages", "rollout_logprobs" if self.old_is_current else "old_logprobs"}
        read |= self.prepared_columns | ({"ref_logprobs"} if self.kl_coef else set())
        return frozenset(read | {CORRECTION_WEIGHTS} if self.uses_correction_weights else read)

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        mask = batch.loss_mask
        # Masked before any arithmetic: where() afterwards would still send 0 * NaN into the gradient.
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
    """[T] the mean of a column [T] over its sequence's trained tokens, on each of the sequence's tokens, with gradient."""
    mask = batch.loss_mask
    trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
    mean = sum_per_sequence(torch.where(mask, column, 0.0), batch) / trained
    return mean[batch.sequence_index]


def compute_clip_fractions(
    *, is_low: Tensor, is_high: Tensor, advantages: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Shares of trained tokens that a clip holds: below it with a negative advantage, above it with a positive one."""
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
