"""Clip-Cov and KL-Cov: restrict updates on tokens whose log-prob and advantage covary strongly.

These tokens drive entropy collapse. Clip-Cov removes a few of them from the gradient, KL-Cov adds a
KL penalty to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from temper_trainer.algorithms.policy_losses.clipped_losses import ClippedLoss
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.settings.lazy_torch import compute_weighted_mean, torch
from temper_trainer.settings.ranges import FiniteFloat, PositiveFloat, Range, check_order
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric

IS_SELECTED = "is_selected"
"""Name of the [T] float32 column from ``prepare``: 1 at the tokens selected by covariance."""


def compute_covariances(batch: SequenceBatch) -> Tensor:
    """Return [T] float64 (log p_old - mean) * (A - mean); 0 at untrained tokens.

    The means are over the trained tokens in the mini-batch.

    Source: Cui et al. 2025, arXiv:2505.22617, equation 8, with the old log-probs in place of the
    current ones, so that the selection is fixed before the update.
    """
    mask = batch.loss_mask
    logprobs, advantages = (
        batch.columns["old_logprobs"].double(),
        batch.columns["advantages"].double(),
    )
    if not bool(mask.any()):
        return torch.zeros_like(logprobs)
    return torch.where(
        mask, (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean()), 0.0
    )


@variant("clip_cov")
class ClipCov(ClippedLoss):
    """PPO loss without gradients from a few random tokens with high covariance.

    Selects max(1, fraction * N) of the mini-batch's N trained tokens at random among those with
    min_covariance < covariance < max_covariance, and sets their loss to 0.

    Source: Cui et al. 2025, arXiv:2505.22617, equations 8 to 10.
    """

    always_needs_old_logprobs: ClassVar[bool] = True
    prepared_columns: ClassVar[frozenset[str]] = frozenset({IS_SELECTED})

    fraction: Annotated[float, Range(above=0, at_most=1)] = 2e-4
    """Fraction of the mini-batch's trained tokens to select."""
    min_covariance: FiniteFloat = 1.0
    """Tokens with a covariance above this may be selected."""
    max_covariance: FiniteFloat = 5.0
    """Tokens with a covariance below this may be selected."""

    def __post_init__(self) -> None:
        check_order("min_covariance", self.min_covariance, "max_covariance", self.max_covariance)

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Select tokens once for the mini-batch, independent of its split into micro-batches."""
        covariance = compute_covariances(batch)
        candidates = (
            batch.loss_mask
            & (covariance > self.min_covariance)
            & (covariance < self.max_covariance)
        )
        hashes = torch.where(candidates, uniform_hash(batch, seed=seed), math.inf)
        return {
            IS_SELECTED: _mark_smallest(
                hashes, count=min(_num_selected(batch, self.fraction), int(candidates.sum()))
            )
        }

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the clipped surrogate, 0 at selected tokens."""
        loss = ClippedLoss.compute_surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        return torch.where(batch.columns[IS_SELECTED] > 0, 0.0, loss)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the clip fractions, and the fraction of tokens that this loss leaves out."""
        metrics = ClippedLoss.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        return {
            **metrics,
            "policy/cov_selected_fraction": compute_weighted_mean(
                batch.columns[IS_SELECTED], batch.loss_mask
            ),
        }


@variant("kl_cov")
class KlCov(PolicyLoss):
    """Unclipped surrogate with a KL penalty on the tokens of highest covariance.

        loss = -rho * A + kl_cov_coef * |log rho|   (the second term only at selected tokens)

    Selects the max(1, fraction * N) tokens of the mini-batch with the highest covariance.

    Source: Cui et al. 2025, arXiv:2505.22617, equations 8, 11 and 12; the distance |log rho| as in
    the authors' code.
    """

    always_needs_old_logprobs: ClassVar[bool] = True
    prepared_columns: ClassVar[frozenset[str]] = frozenset({IS_SELECTED})

    fraction: Annotated[float, Range(above=0, at_most=1)] = 2e-4
    """Fraction of the mini-batch's trained tokens to select."""
    kl_cov_coef: PositiveFloat = 1.0
    """Weight of |log rho| at selected tokens."""

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Select tokens once for the mini-batch.

        Ties are broken by a hash of sample id and position, so that sample order does not matter.
        """
        covariance = torch.where(batch.loss_mask, compute_covariances(batch), -math.inf)
        shuffled = uniform_hash(batch, seed=seed).argsort(stable=True)
        ranked = shuffled[covariance[shuffled].argsort(descending=True, stable=True)]
        is_selected = torch.zeros(batch.num_tokens)
        is_selected[ranked[: _num_selected(batch, self.fraction)]] = 1.0
        return {IS_SELECTED: is_selected}

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return -rho * A, plus the distance at selected tokens."""
        distance = torch.where(batch.columns[IS_SELECTED] > 0, log_ratio.abs(), 0.0)
        return -log_ratio.exp() * advantages + self.kl_cov_coef * distance

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return the fraction of selected tokens."""
        metrics = PolicyLoss.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        return {
            **metrics,
            "policy/cov_selected_fraction": compute_weighted_mean(
                batch.columns[IS_SELECTED], batch.loss_mask
            ),
        }


def _num_selected(batch: SequenceBatch, fraction: float) -> int:
    trained = int(batch.loss_mask.sum())
    # At least one token: the fraction of a short mini-batch would round down to none.
    return min(trained, max(1, int(fraction * trained)))


def _mark_smallest(ranked: Tensor, *, count: int) -> Tensor:
    """Return [T] float32 with 1 at the ``count`` smallest entries and 0 elsewhere."""
    chosen = torch.zeros(len(ranked))
    chosen[ranked.argsort(stable=True)[:count]] = 1.0
    return chosen


# The factors are odd: multiplying by an odd number modulo 2^64 never makes two keys equal.
_FACTORS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)


# A float64 represents all integers of this size exactly.
_BITS = 52


def uniform_hash(batch: SequenceBatch, *, seed: int) -> Tensor:
    """Return [T] float64 uniform in [0, 1), a hash of (seed, sample id, position) for each token.

    Unlike random generator output, a token's hash depends neither on the sample order nor on how
    samples are split. It is computed with 64-bit integers that wrap around.
    """
    starts = batch.sequence_starts.long()[:-1]
    position = torch.arange(batch.num_tokens) - starts[batch.sequence_index]
    # Two primes, so that neighboring samples and positions do not get equal keys.
    key = batch.sample_ids[batch.sequence_index] * 1_000_003 + position * 8_191 + seed
    for factor in _FACTORS:
        key = key * factor
        key = key ^ (key >> 29)
    return (key & ((1 << _BITS) - 1)).double() / (1 << _BITS)
