"""Measure and correct the mismatch between the sampler's log-probs and the trainer's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.reduction import find_trained_sequences, sum_per_sequence
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, KlEstimator, estimate_kl
from temper_trainer.algorithms.rejection_rules import (
    KlRule,
    RatioRule,
    RejectionRule,
    RuleScope,
    apply_rejection_rules,
)
from temper_trainer.config.rollout_correction import RejectionBounds, RolloutCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance weights of a step, and the metrics that describe them."""

    weights: Tensor
    """[T] float32; 0 at untrained and rejected tokens."""
    metrics: dict[str, float]
    """Fractions and moments over trained tokens or completions."""


def compute_rollout_correction(
    config: RolloutCorrection,
    *,
    samples: SequenceBatch,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
) -> Correction:
    """Compute the importance weights of a step's tokens.

    With r_t = p_old(t) / p_rollout(t):

        token:     w_t = min(r_t, truncate_at)
        sequence:  w_t = min(product of r_s over the completion of t, truncate_at)
        others:    w_t = 1

    Weights become 0 for tokens that fail a ``reject`` rule, see `apply_rejection_rules`. With
    self_normalize the weights are divided by their mean over the step's trained tokens. Sums are
    float64.

    Rejected tokens still count in the loss denominators, which are fixed when the batch is planned.

    Source: truncation: Espeholt et al. 2018, arXiv:1802.01561, and Yao et al. 2025, "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training"; sequence level: Liu et al. 2025, "When
    Speed Kills Stability"; self-normalization: Owen 2013, "Monte Carlo theory, methods and
    examples", chapter 9.
    """
    mask = samples.loss_mask
    log_ratio = torch.where(mask, old_logprobs.double() - rollout_logprobs.double(), 0.0)
    rejection = apply_rejection_rules(
        [_build_rule(name, bounds) for name, bounds in config.reject.items()],
        log_ratio=log_ratio,
        samples=samples,
    )
    raw = _raw_weights(config.level, log_ratio, samples=samples)
    truncate_at = config.truncate_at
    weights = raw if truncate_at is None else raw.clamp(max=truncate_at)
    weights = torch.where(rejection.is_kept, weights, 0.0)
    total = float(weights.sum())
    if config.self_normalize and total > 0:
        # Over all trained tokens, rejected ones included, because the loss is divided by that
        # number.
        weights = weights * (int(mask.sum()) / total)
    metrics = _describe(
        raw=raw[mask],
        weights=weights[mask],
        is_kept=rejection.is_kept[mask],
        truncate_at=truncate_at,
    )
    kept_per_sequence = sum_per_sequence(rejection.is_kept.double(), samples)
    is_rejected = kept_per_sequence[find_trained_sequences(samples)] == 0
    metrics["correction/rejected_fraction"] = float(is_rejected.double().mean())
    return Correction(weights=weights.float(), metrics=metrics | rejection.metrics)


def _build_rule(name: str, bounds: RejectionBounds) -> RejectionRule:
    statistic, over = name.split("_")
    # Both parts are checked by the configuration.
    if statistic == "ratio":
        return RatioRule(over=cast(RuleScope, over), low=bounds.low, high=bounds.high)
    assert bounds.high is not None
    return KlRule(
        over=cast(RuleScope, over), estimator=cast(KlEstimator, statistic), high=bounds.high
    )


def _raw_weights(level: str, log_ratio: Tensor, *, samples: SequenceBatch) -> Tensor:
    if level == "none":
        return torch.ones_like(log_ratio)
    if level == "sequence":
        # A sum of logarithms: multiplying thousands of ratios would overflow before the clamp.
        log_ratio = sum_per_sequence(log_ratio, samples)[samples.sequence_index]
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _describe(
    *, raw: Tensor, weights: Tensor, is_kept: Tensor, truncate_at: float | None
) -> dict[str, float]:
    if raw.numel() == 0:
        return {}
    squares = float(weights.square().mean())
    return {
        "correction/weight_mean": float(weights.mean()),
        "correction/weight_max": float(weights.max()),
        "correction/masked_fraction": float((~is_kept).double().mean()),
        # Counted on the raw weights, because no truncated weight is above the bound.
        "correction/truncated_fraction": 0.0
        if truncate_at is None
        else float((raw > truncate_at).double().mean()),
        "correction/effective_sample_fraction": float(weights.mean()) ** 2 / squares
        if squares > 0
        else 0.0,
    }


RATIO_SQUARE_MEAN = "mismatch/ratio_square_mean"
"""Metric used to compute the effective sample fraction; it is not logged itself."""


def compute_mismatch_metrics(
    logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Metric]:
    """Measure how far the sampler's log-probs are from the trainer's on trained tokens.

    Both measure one policy with nominally equal weights. Large values mean a stale, truncated or
    broken sampler.

        mismatch/abs_mean, abs_max              |log p - log q| in nats
        mismatch/kl                             k3 estimate of KL(sampler, trainer)
        mismatch/ratio_mean, ratio_square_mean  of w = p / q, see compute_effective_sample_fraction

    Args:
        logprobs: [T] of the trainer, before this step's first update.
        rollout_logprobs: [T] of the sampler.
        loss_mask: [T] bool; values outside it are ignored, even NaN.
    """
    # Not multiplied by the mask, because NaN * 0 is NaN.
    old = torch.where(loss_mask, logprobs.detach().float(), 0.0)
    rollout = torch.where(loss_mask, rollout_logprobs.float(), 0.0)
    distance = (old - rollout).abs()
    # exp overflows float32 above 88, and one such token would make the means infinite.
    ratio = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch/abs_mean": compute_weighted_mean(distance, loss_mask),
        "mismatch/abs_max": Metric(value=distance.max(), reduction="max"),
        "mismatch/kl": compute_weighted_mean(
            estimate_kl(rollout, ref_logprobs=old, estimator="k3"), loss_mask
        ),
        "mismatch/ratio_mean": compute_weighted_mean(ratio, loss_mask),
        "mismatch/ratio_max": Metric(
            value=torch.where(loss_mask, ratio, 0.0).max(), reduction="max"
        ),
        RATIO_SQUARE_MEAN: compute_weighted_mean(ratio.square(), loss_mask),
    }


def compute_effective_sample_fraction(metrics: Mapping[str, Metric]) -> float:
    """Return (sum w)^2 / (N * sum w^2): the effective fraction of N tokens weighted by w.

    It is 1 if all weights are equal.

    Args:
        metrics: Merged over all micro-batches and ranks; two means of ``compute_mismatch_metrics``
            are read.
    """
    return metrics["mismatch/ratio_mean"].result ** 2 / metrics[RATIO_SQUARE_MEAN].result
