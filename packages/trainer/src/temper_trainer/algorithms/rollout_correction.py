"""Rollout correction: importance weights for the difference between the sampler's log-probs and the trainer's, masks and rejection.

What is left out has weight 0 and keeps its place in the denominators, which were fixed where the batch was planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.reduction import find_trained_sequences, sum_per_sequence
from temper_trainer.algorithms.kl import MAX_LOG_RATIO, estimate_kl
from temper_trainer.config.algorithm import RolloutCorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What ``compute_rollout_correction`` returns."""

    weights: Tensor
    """[T] float32, 0 at untrained tokens and at what is left out."""
    metrics: dict[str, float]
    """Shares and moments, over trained tokens or trained completions."""


def compute_rollout_correction(
    config: RolloutCorrectionConfig,
    *,
    samples: SequenceBatch,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
) -> Correction:
    """Weights of a step's tokens.

    With r_t = p_old / p_rollout, the raw weight is r_t (token), or the product of a completion's r_t (sequence), or 1 (none). It is 0
    outside [mask_low, mask_high], else min(raw, truncate_at); a completion whose mean KL estimate exceeds reject_kl is 0 as a whole; and
    self-normalised weights are divided by their mean over the step's trained tokens. Sums are float64.

    Source: truncation: Espeholt et al. 2018, arXiv:1802.01561, and Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; masking and sequence level: Liu et al. 2025, "When Speed Kills Stability"; self-normalisation: Owen 2013,
    "Monte Carlo theory, methods and examples", chapter 9.
    """
    mask = samples.loss_mask
    ours = torch.where(mask, old_logprobs.double(), 0.0)
    theirs = torch.where(mask, rollout_logprobs.double(), 0.0)
    log_ratio = ours - theirs
    raw = _raw_weights(config.level, log_ratio, samples=samples)
    is_kept = _within(raw, low=config.mask_low, high=config.mask_high) & mask
    is_rejected = _rejected(config, ours=ours, theirs=theirs, samples=samples)
    weights = raw if config.truncate_at is None else raw.clamp(max=config.truncate_at)
    weights = torch.where(is_kept & ~is_rejected[samples.sequence_index], weights, 0.0)
    total = float(weights.sum())
    if config.self_normalize and total > 0:
        weights = weights * (int(mask.sum()) / total)
    metrics = _describe(config, raw=raw[mask], weights=weights[mask], is_kept=is_kept[mask])
    metrics["correction/rejected_fraction"] = float(
        is_rejected[find_trained_sequences(samples)].double().mean()
    )
    return Correction(weights=weights.float(), metrics=metrics)


def _raw_weights(level: str, log_ratio: Tensor, *, samples: SequenceBatch) -> Tensor:
    if level == "none":
        return torch.ones_like(log_ratio)
    if level == "sequence":
        log_ratio = sum_per_sequence(log_ratio, samples)[samples.sequence_index]
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _within(raw: Tensor, *, low: float | None, high: float | None) -> Tensor:
    is_within = torch.ones_like(raw, dtype=torch.bool)
    if low is not None:
        is_within &= raw >= low
    if high is not None:
        is_within &= raw <= high
    return is_within


def _rejected(
    config: RolloutCorrectionConfig, *, ours: Tensor, theirs: Tensor, samples: SequenceBatch
) -> Tensor:
    """[B] bool: completions too far from what the trainer would have said."""
    if config.reject_kl is None:
        return torch.zeros(samples.num_sequences, dtype=torch.bool)
    kl = estimate_kl(theirs, ref_logprobs=ours, estimator=config.reject_kl_estimator)
    trained = sum_per_sequence(samples.loss_mask.double(), samples).clamp(min=1.0)
    return (
        sum_per_sequence(torch.where(samples.loss_mask, kl, 0.0), samples) / trained
        > config.reject_kl
    )


def _describe(
    config: RolloutCorrectionConfig, *, raw: Tensor, weights: Tensor, is_kept: Tensor
) -> dict[str, float]:
    if raw.numel() == 0:
        return {}
    squares = float(weights.square().mean())
    return {
        "correction/weight_mean": float(weights.mean()),
        "correction/weight_max": float(weights.max()),
        "correction/masked_fraction": float((~is_kept).double().mean()),
        # From the raw weights: after truncation none is above the bound.
        "correction/truncated_fraction": 0.0
        if config.truncate_at is None
        else float((raw > config.truncate_at).double().mean()),
        "correction/effective_sample_fraction": float(weights.mean()) ** 2 / squares
        if squares > 0
        else 0.0,
    }


SQUARES = "mismatch/ratio_square_mean"
"""A piece of the effective sample share, not a number for the log."""


def compute_mismatch_metrics(
    logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Metric]:
    """Difference of two measurements of one policy, over trained tokens; large ones mean a stale, truncated or broken sampler.

    ``mismatch/abs_mean`` and ``mismatch/abs_max`` are of |log p - log q| in nats; ``mismatch/kl`` is the k3 estimate of KL(sampler,
    trainer), whose tokens the sampler drew. ``mismatch/ratio_mean`` and ``mismatch/ratio_square_mean`` are of w = p / q, from which
    ``compute_effective_sample_fraction`` follows.

    Args:
        logprobs: [T] the trainer's, before this step's first update.
        rollout_logprobs: [T] the sampler's.
        loss_mask: [T] bool; nothing outside it leaks in, not even NaN.
    """
    ours = torch.where(loss_mask, logprobs.detach().float(), 0.0)
    theirs = torch.where(loss_mask, rollout_logprobs.float(), 0.0)
    distance = (ours - theirs).abs()
    ratio = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch/abs_mean": weighted_mean(distance, loss_mask),
        "mismatch/abs_max": Metric(value=distance.max(), reduction="max"),
        "mismatch/kl": weighted_mean(
            estimate_kl(theirs, ref_logprobs=ours, estimator="k3"), loss_mask
        ),
        "mismatch/ratio_mean": weighted_mean(ratio, loss_mask),
        "mismatch/ratio_max": Metric(
            value=torch.where(loss_mask, ratio, 0.0).max(), reduction="max"
        ),
        SQUARES: weighted_mean(ratio.square(), loss_mask),
    }


def compute_effective_sample_fraction(metrics: Mapping[str, Metric]) -> float:
    """Share of the tokens that the importance weights leave in effect: (sum w)^2 / (N * sum w^2), 1 where all weights are equal.

    Args:
        metrics: merged over all micro-batches and ranks; two means of ``compute_mismatch_metrics`` are read.
    """
    return metrics["mismatch/ratio_mean"].result ** 2 / metrics[SQUARES].result
