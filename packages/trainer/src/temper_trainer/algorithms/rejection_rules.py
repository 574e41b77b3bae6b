"""Rejection rules of rollout correction: tests that a token or a completion must pass.

A rule compares a statistic of the ratio r_t = p_old(t) / p_rollout(t) with bounds, either token by
token or over a completion. Rules reject; they never change the weight of what they keep.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.algorithms.kl import KlEstimator, estimate_kl

RuleScope = Literal["token", "sum", "mean", "max"]
"""Statistic that a rule compares: that of each token, or the sum, mean or maximum over the trained
tokens of a completion. With `token`, the rule rejects single tokens, else whole completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """Reject where the ratio p_old / p_rollout is outside [low, high].

    With over=sum the ratio is the product over the completion, with over=mean its geometric mean,
    and over=max rejects a completion if any of its tokens is outside the bounds.
    """

    over: RuleScope = "token"
    low: float | None = None
    """Smallest ratio to keep, above 0. None has no lower bound."""
    high: float | None = None
    """Largest ratio to keep, above 0. None has no upper bound."""

    def __post_init__(self) -> None:
        low = 0.0 if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if (self.low is None and self.high is None) or not (
            0 <= low < high and self.low != 0 and not math.isnan(high)
        ):
            raise ConfigError(
                f"a rule by ratio has low {self.low} and high {self.high}, but needs at least one "
                "bound, and bounds above 0 with low smaller than high: set low below 1 or high "
                "above 1."
            )

    @property
    def name(self) -> str:
        """Name in metrics."""
        return f"ratio_{self.over}"

    def find_kept(self, log_ratio: Tensor, *, samples: SequenceBatch) -> Tensor:
        """Return [T] bool: True at tokens to keep.

        Unless ``over`` is ``token``, all tokens of a completion get the same value.

        Args:
            log_ratio: [T] float64 log p_old - log p_rollout, 0 at untrained tokens.
            samples: B sequences, T tokens.
        """
        # Compare logarithms, because multiplying thousands of ratios overflows.
        low = -math.inf if self.low is None else math.log(self.low)
        high = math.inf if self.high is None else math.log(self.high)
        if self.over == "max":
            is_outside = samples.loss_mask & ((log_ratio < low) | (log_ratio > high))
            return ~_any_per_sequence(is_outside, samples)[samples.sequence_index]
        statistic = _gather_statistic(log_ratio, over=self.over, samples=samples)
        return (statistic >= low) & (statistic <= high)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRule:
    """Reject where an estimate of KL(sampler, trainer) exceeds a bound."""

    high: float
    """Largest estimate to keep, in nats, above 0."""
    over: RuleScope = "mean"
    estimator: KlEstimator = "k3"
    """Schulman's estimator of the KL divergence. k2 and k3 are never negative; k1 is -log r."""

    def __post_init__(self) -> None:
        if not self.high > 0:
            raise ConfigError(
                f"a rule by kl has high {self.high}, but must be a number of nats above 0: the "
                "estimates are 0 where sampler and trainer agree."
            )

    @property
    def name(self) -> str:
        """Name in metrics."""
        return f"{self.estimator}_{self.over}"

    def find_kept(self, log_ratio: Tensor, *, samples: SequenceBatch) -> Tensor:
        """Return [T] bool: True at tokens to keep.

        Unless ``over`` is ``token``, all tokens of a completion get the same value.

        Args:
            log_ratio: [T] float64 log p_old - log p_rollout, 0 at untrained tokens.
            samples: B sequences, T tokens.
        """
        # KL(sampler, trainer), because the tokens were drawn from the sampler. The estimate depends
        # only on the difference between the two arguments, which is log_ratio.
        kl = estimate_kl(
            torch.zeros_like(log_ratio), ref_logprobs=log_ratio, estimator=self.estimator
        )
        if self.over == "max":
            is_outside = samples.loss_mask & (kl > self.high)
            return ~_any_per_sequence(is_outside, samples)[samples.sequence_index]
        return _gather_statistic(kl, over=self.over, samples=samples) <= self.high


RejectionRule = RatioRule | KlRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The tokens that all rules keep, and metrics per rule."""

    is_kept: Tensor
    """[T] bool; False at untrained tokens."""
    metrics: dict[str, float]
    """Fraction of the trained tokens that each rule rejects."""


def apply_rejection_rules(
    rules: Sequence[RejectionRule], *, log_ratio: Tensor, samples: SequenceBatch
) -> Rejection:
    """Return the trained tokens that pass every rule.

    Each rule sees all trained tokens, so the order of the rules does not matter.

    Args:
        rules: Any number of rules; without one, all trained tokens are kept.
        log_ratio: [T] log p_old - log p_rollout; entries at untrained tokens are ignored, even NaN.
        samples: B sequences, T tokens.

    Source: bounds on the ratio of a token, on the product and on the geometric mean: Liu et al.
    2025, "When Speed Kills Stability", richardli.xyz/rl-collapse, parts 1 and 3; masks by a
    completion's largest or mean divergence: Li et al. 2025, arXiv:2512.23075.
    """
    mask = samples.loss_mask
    log_ratio = torch.where(mask, log_ratio.double(), 0.0)
    is_kept = mask.clone()
    metrics: dict[str, float] = {}
    for rule in rules:
        passes = rule.find_kept(log_ratio, samples=samples) & mask
        is_kept &= passes
        fraction = _rejected_fraction(passes, samples)
        metrics[f"correction/masked_fraction/{rule.name}"] = fraction
    return Rejection(is_kept=is_kept, metrics=metrics)


def _rejected_fraction(is_kept: Tensor, samples: SequenceBatch) -> float:
    trained = is_kept[samples.loss_mask]
    return float((~trained).double().mean()) if trained.numel() else 0.0


def _gather_statistic(column: Tensor, *, over: RuleScope, samples: SequenceBatch) -> Tensor:
    """Return the statistic to compare for each token [T]: the token's own or its completion's."""
    if over == "token":
        return column
    statistic = sum_per_sequence(torch.where(samples.loss_mask, column, 0.0), samples)
    if over == "mean":
        # At least 1, because a completion without trained tokens would be 0 / 0.
        trained = sum_per_sequence(samples.loss_mask.double(), samples).clamp(min=1.0)
        statistic = statistic / trained
    return statistic[samples.sequence_index]


def _any_per_sequence(column: Tensor, samples: SequenceBatch) -> Tensor:
    """Return [B] bool: True if a token of the sequence is True."""
    return sum_per_sequence(column.double(), samples) > 0
