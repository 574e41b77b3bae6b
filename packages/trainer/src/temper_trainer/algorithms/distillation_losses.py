"""Distillation on the policy's own tokens: the teacher's log-probs as a loss. No backend is named here, so every engine gives the same."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import (
    LOGPROB_AT_IDS,
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_trainer.algorithms.kl import KlEstimator, estimate_kl

_ALMOST_ONE = 1.0 - 1e-6
"""The mass of the named tokens is held below this, so that the rest has a logarithm."""


@register_objective("reverse_kl")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReverseKlObjective(Objective):
    """KL(policy, teacher) from the tokens that the policy drew.

    loss = w * clamp(k(log p, log q)), with Schulman's k2 or k3 and the teacher's weight w. The expected gradient of k2 is that of
    KL(policy, teacher), which seeks the teacher's modes.

    Source: Agarwal et al. 2023, arXiv:2306.13649, section 3; Gu et al. 2023, arXiv:2306.08543; estimators as in ``kl.estimate_kl``.
    """

    estimator: KlEstimator = "k2"
    """k2 or k3; k1 is no loss."""
    clamp: float | None = None
    """Bound on a token's loss before the weight; beyond it there is no gradient. None is off."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            raise ConfigError(
                "distillation.kl_estimator k1 in a loss has zero expected gradient: use k2 or k3."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs."""
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        """The teacher's log-probs and weights."""
        return frozenset({"teacher_logprobs", "teacher_weights"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        mask = batch.loss_mask & (batch.columns["teacher_weights"] > 0)
        logprobs = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        teacher = torch.where(mask, batch.columns["teacher_logprobs"], 0.0)
        kl = estimate_kl(logprobs, ref_logprobs=teacher, estimator=self.estimator)
        gap = (logprobs - teacher).detach()
        metrics = {"distill/logprob_gap": weighted_mean(gap, mask)} | _shared_metrics(
            kl, clamp=self.clamp, mask=mask, batch=batch
        )
        return LossTerms(
            loss=_clamped(kl, clamp=self.clamp)
            * torch.where(mask, batch.columns["teacher_weights"], 0.0),
            metrics=metrics,
        )


@register_objective("top_k_distillation")
@dataclass(frozen=True, slots=True, kw_only=True)
class TopKObjective(Objective):
    """A divergence between teacher q and policy p over the tokens that the teacher named.

    forward_kl: sum of q (log q - log p). jensen_shannon with mixture m and M = m q + (1 - m) p: m KL(q, M) + (1 - m) KL(p, M). With
    ``tail`` all other tokens together count as one more, whose mass is what the named ones leave.

    Source: forward KL: Hinton et al. 2015, arXiv:1503.02531; the mixture: Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """

    divergence: Literal["forward_kl", "jensen_shannon"] = "forward_kl"
    """Which."""
    tail: bool = True
    """Whether the mass outside the named tokens counts."""
    mixture: float = 0.5
    """Weight of the teacher in the mixture; only for jensen_shannon."""
    clamp: float | None = None
    """Bound on a token's loss before the weight; beyond it there is no gradient. None is off."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs of the named tokens."""
        return frozenset({HeadOutput.LOGPROB_AT})

    @property
    def columns(self) -> frozenset[str]:
        """The named tokens, the teacher's log-probs of them, and its weights."""
        return frozenset({LOGPROB_AT_IDS, "teacher_top_logprobs", "teacher_weights"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        mask = batch.loss_mask & (batch.columns["teacher_weights"] > 0)
        is_named = mask[:, None] & batch.columns["teacher_top_logprobs"].isfinite()
        # Masked before any arithmetic: where() afterwards would still send 0 * NaN into the gradient.
        ours = torch.where(is_named, head_outputs[HeadOutput.LOGPROB_AT], 0.0)
        theirs = torch.where(is_named, batch.columns["teacher_top_logprobs"], 0.0)
        terms = torch.where(is_named, self._terms(theirs, ours), 0.0).sum(-1)
        mass = torch.where(is_named, theirs.exp(), 0.0).sum(-1)
        if self.tail:
            rest = [
                torch.log1p(-torch.where(is_named, logs.exp(), 0.0).sum(-1).clamp(max=_ALMOST_ONE))
                for logs in (theirs, ours)
            ]
            terms = terms + self._terms(rest[0], rest[1])
        terms = torch.where(mask, terms, 0.0)
        metrics = {"distill/top_k_mass": weighted_mean(mass, mask)} | _shared_metrics(
            terms, clamp=self.clamp, mask=mask, batch=batch
        )
        return LossTerms(
            loss=_clamped(terms, clamp=self.clamp)
            * torch.where(mask, batch.columns["teacher_weights"], 0.0),
            metrics=metrics,
        )

    def _terms(self, theirs: Tensor, ours: Tensor) -> Tensor:
        """One token's part of the divergence, from log-probs of teacher and policy."""
        if self.divergence == "forward_kl":
            return theirs.exp() * (theirs - ours)
        p, q, m = ours.exp(), theirs.exp(), self.mixture
        middle = torch.log(m * q + (1.0 - m) * p)
        return m * q * (theirs - middle) + (1.0 - m) * p * (ours - middle)


def compute_teacher_reward(
    logprobs: Tensor,
    *,
    teacher_logprobs: Tensor,
    weights: Tensor,
    loss_mask: Tensor,
    estimator: KlEstimator,
    clamp: float | None,
) -> Tensor:
    """[T] float32 reward of each token: -w * clamp(k(log p, log q)), 0 where nothing is trained or no teacher answered.

    With k1 it is w * (log q - log p), whose policy gradient, each token credited with its own reward, is that of KL(policy, teacher).

    Args:
        logprobs: [T] of the policy before this step's first update.
        teacher_logprobs: [T].
        weights: [T] of the teachers.
        loss_mask: [T] bool.
        estimator: k1, k2 or k3.
        clamp: bound on a token's reward before the weight; None is off.

    Source: Lu 2025, "On-Policy Distillation", Thinking Machines Lab.
    """
    mask = loss_mask & (weights > 0)
    ours, theirs = torch.where(mask, logprobs, 0.0), torch.where(mask, teacher_logprobs, 0.0)
    kl = estimate_kl(ours, ref_logprobs=theirs, estimator=estimator)
    return -torch.where(mask, _clamped(kl, clamp=clamp) * weights, 0.0)


def _clamped(column: Tensor, *, clamp: float | None) -> Tensor:
    return column if clamp is None else column.clamp(-clamp, clamp)


def _shared_metrics(
    column: Tensor, *, clamp: float | None, mask: Tensor, batch: SequenceBatch
) -> dict[str, Metric]:
    found = {
        "distill/divergence": weighted_mean(column, mask),
        "distill/taught_fraction": weighted_mean(mask, batch.loss_mask),
    }
    if clamp is not None:
        found["distill/clamped_fraction"] = weighted_mean(column.detach().abs() > clamp, mask)
    return found
