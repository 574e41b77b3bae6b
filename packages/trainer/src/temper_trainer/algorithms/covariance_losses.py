"""Clip-Cov and KL-Cov: tokens whose log-prob and advantage vary together are what makes entropy collapse; few of them are held back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.policy_losses import ClippedObjective
from temper_trainer.algorithms.surrogate import SurrogateObjective

IS_SELECTED = "is_held"
"""Name of the [T] float32 column that ``prepare`` makes: 1 at the tokens held back."""


def compute_covariances(batch: SequenceBatch) -> Tensor:
    """[T] float64: (log p_old - mean) * (A - mean), means over the trained tokens of the mini-batch; 0 at untrained tokens.

    Source: Cui et al. 2025, arXiv:2505.22617, equation 8.
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


@register_objective("clip_cov")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovObjective(ClippedObjective):
    """PPO's clip, and a random share of the tokens of high covariance has no gradient at all.

    Chosen are share * N of the mini-batch's N trained tokens (at least one), at random among those with low < covariance < high.

    Source: Cui et al. 2025, arXiv:2505.22617, equations 8 to 10.
    """

    always_needs_old_logprobs: ClassVar[bool] = True
    prepared_columns: ClassVar[frozenset[str]] = frozenset({IS_SELECTED})

    share: float = 2e-4
    """Of the mini-batch's trained tokens."""
    low: float = 1.0
    """Covariance above which a token may be chosen."""
    high: float = 5.0
    """Covariance below which a token may be chosen."""

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Which tokens are held back, once for the whole mini-batch."""
        covariance = compute_covariances(batch)
        candidates = batch.loss_mask & (covariance > self.low) & (covariance < self.high)
        drawn = torch.where(candidates, uniform_hash(batch, seed=seed), math.inf)
        return {
            IS_SELECTED: _first(
                drawn, count=min(_share_of(batch, self.share), int(candidates.sum()))
            )
        }

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Clipped, and 0 where held back."""
        loss = ClippedObjective.surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        return torch.where(batch.columns[IS_SELECTED] > 0, 0.0, loss)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Those of its kin, and the share of tokens held back."""
        found = ClippedObjective.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        return {
            **found,
            "policy/cov_selected_fraction": weighted_mean(
                batch.columns[IS_SELECTED], batch.loss_mask
            ),
        }


@register_objective("kl_cov")
@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovObjective(SurrogateObjective):
    """The plain surrogate, and the tokens of highest covariance are held near the old policy.

    loss = -rho * A, plus kl_cov_coef * |log rho| on the share * N tokens of the mini-batch (at least one) whose covariance is highest.

    Source: Cui et al. 2025, arXiv:2505.22617, equations 8, 11 and 12; the distance |log rho| as in the authors' code.
    """

    always_needs_old_logprobs: ClassVar[bool] = True
    prepared_columns: ClassVar[frozenset[str]] = frozenset({IS_SELECTED})

    share: float = 2e-4
    """Of the mini-batch's trained tokens."""
    kl_cov_coef: float = 1.0
    """Weight of the distance."""

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Which tokens are held back, once for the whole mini-batch; ties are broken by lot, so that no order of samples matters."""
        covariance = torch.where(batch.loss_mask, compute_covariances(batch), -math.inf)
        by_lot = uniform_hash(batch, seed=seed).argsort(stable=True)
        ranked = by_lot[covariance[by_lot].argsort(descending=True, stable=True)]
        held = torch.zeros(batch.num_tokens)
        held[ranked[: _share_of(batch, self.share)]] = 1.0
        return {IS_SELECTED: held}

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-rho * A, and the distance where held back."""
        held = torch.where(batch.columns[IS_SELECTED] > 0, log_ratio.abs(), 0.0)
        return -log_ratio.exp() * advantages + self.kl_cov_coef * held

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Those of its kin, and the share of tokens held back."""
        found = SurrogateObjective.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        return {
            **found,
            "policy/cov_selected_fraction": weighted_mean(
                batch.columns[IS_SELECTED], batch.loss_mask
            ),
        }


def _share_of(batch: SequenceBatch, share: float) -> int:
    trained = int(batch.loss_mask.sum())
    return min(trained, max(1, int(share * trained)))


def _first(ranked: Tensor, *, count: int) -> Tensor:
    """[T] float32: 1 at the ``count`` smallest entries."""
    chosen = torch.zeros(len(ranked))
    chosen[ranked.argsort(stable=True)[:count]] = 1.0
    return chosen


_FACTORS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)


_BITS = 52


def uniform_hash(batch: SequenceBatch, *, seed: int) -> Tensor:
    """[T] float64 in [0, 1), one for each token: a multiply-and-shift hash in wrapping 64-bit integers."""
    starts = batch.sequence_starts.long()[:-1]
    position = torch.arange(batch.num_tokens) - starts[batch.sequence_index]
    key = batch.sample_ids[batch.sequence_index] * 1_000_003 + position * 8_191 + seed
    for factor in _FACTORS:
        key = key * factor
        key = key ^ (key >> 29)
    return (key & ((1 << _BITS) - 1)).double() / (1 << _BITS)
