"""The actor's objective: a policy loss with correction weights, entropy bonus and KL."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_trainer.algorithms.importance_weights import compute_mismatch_metrics
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, KlLossEstimator, estimate_kl_loss
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss

CORRECTION_WEIGHTS = "correction_weights"
"""Name of the [T] float32 column with importance weights from ``compute_rollout_correction``."""


@register_objective("policy")
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(Objective):
    """Train a policy with a policy loss.

        loss = w * surrogate - entropy_coef * H + kl_coef * KL(policy, reference)

    per trained token. The correction weights w apply only to the surrogate.
    """

    loss: PolicyLoss = field(default_factory=Ppo)
    """Computes the surrogate."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with 0 the entropy is only reported."""
    kl_coef: float = 0.0
    """Weight of KL(policy, reference); above 0 it reads ref_logprobs."""
    kl_estimator: KlLossEstimator = "k3"
    """Estimator of the KL in the loss, not k1, which has zero expected gradient."""
    kl_clamp: float | None = None
    """Bound on the estimate of a token in nats, see `estimate_kl_loss`; None is off."""
    old_is_current: bool = False
    """True if the step makes one update and no pass measured old_logprobs.

    Then rho is exactly 1 and has the same gradient as log p. Ratio metrics would be constants and
    are not reported; the mismatch to rollout_logprobs is reported in their place.
    """
    uses_correction_weights: bool = False
    """True to multiply the surrogate with the column correction_weights."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError("kl_estimator k1 in a loss has zero expected gradient: use k2 or k3.")

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs and entropy."""
        return frozenset({HeadOutput.LOGPROB, HeadOutput.ENTROPY})

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the batch that the loss reads, given its settings."""
        read = {"advantages", "rollout_logprobs" if self.old_is_current else "old_logprobs"}
        read |= self.loss.prepared_columns | self.loss.own_columns
        read |= {"ref_logprobs"} if self.kl_coef else set()
        return frozenset(read | {CORRECTION_WEIGHTS} if self.uses_correction_weights else read)

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Return the columns that the policy loss prepares."""
        return self.loss.prepare(batch, seed=seed)

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
        token_log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio = self.loss.compute_effective_log_ratio(token_log_ratio, batch)
        loss = self.loss.compute_surrogate(
            log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        if self.uses_correction_weights:
            loss = loss * torch.where(mask, batch.columns[CORRECTION_WEIGHTS], 0.0)
        metrics = (
            compute_mismatch_metrics(
                old, rollout_logprobs=batch.columns["rollout_logprobs"], loss_mask=mask
            )
            if self.old_is_current
            else _ratio_metrics(log_ratio.detach(), mask)
            | self.loss.clip_metrics(log_ratio.detach(), advantages=advantages, batch=batch)
        )
        metrics |= self.loss.mask_metrics(logprobs.detach(), advantages=advantages, batch=batch)
        if self.entropy_coef:
            entropy = torch.where(mask, head_outputs[HeadOutput.ENTROPY], 0.0)
            loss = loss - self.entropy_coef * entropy
        metrics |= measure_entropy(head_outputs, mask=mask)
        if self.kl_coef:
            reference = torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            kl = estimate_kl_loss(
                logprobs,
                ref_logprobs=reference,
                log_ratio=token_log_ratio,
                estimator=self.kl_estimator,
                clamp=self.kl_clamp,
            )
            loss = loss + self.kl_coef * kl
            metrics["policy/ref_kl"] = compute_weighted_mean(kl, mask)
        return LossTerms(loss=loss, metrics=metrics)


def measure_entropy(head_outputs: HeadOutputs, *, mask: Tensor) -> dict[str, Metric]:
    """Return the mean entropy of the trained tokens; empty if the head did not compute it."""
    if HeadOutput.ENTROPY not in head_outputs.columns:
        return {}
    # Detached, so that the head can skip the entropy's backward pass.
    entropy = head_outputs[HeadOutput.ENTROPY].detach()
    return {"policy/entropy": compute_weighted_mean(torch.where(mask, entropy, 0.0), mask)}


def _ratio_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    ratio = log_ratio.exp()
    return {
        "policy/ratio_mean": compute_weighted_mean(ratio, mask),
        "policy/ratio_error_max": Metric(
            value=torch.where(mask, (ratio - 1.0).abs(), 0.0).max(), reduction="max"
        ),
        # The k3 estimate of KL(old, current), which unlike the mean log-ratio is never negative.
        "policy/old_kl": compute_weighted_mean(ratio - 1.0 - log_ratio, mask),
    }
