"""Losses and rewards of on-policy distillation from the teacher's log-probs."""

import math
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

_MAX_MASS = 1.0 - 1e-6
"""Bound on the summed probability of the top-k tokens, so that log(1 - mass) stays finite."""


@register_objective("reverse_kl")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReverseKlObjective(Objective):
    """Reverse KL(policy, teacher), estimated from the tokens that the policy sampled.

        loss = w * clamp(k(log p, log q))

    k is Schulman's k2 or k3 and w the teacher's weight. The expected gradient of k2 is that of
    KL(policy, teacher), which is mode-seeking.

    Source: Agarwal et al. 2023, arXiv:2306.13649, section 3; Gu et al. 2023, arXiv:2306.08543;
    estimators as in ``kl.estimate_kl``.
    """

    estimator: KlEstimator = "k2"
    """k2 or k3; k1 has no useful gradient."""
    clamp: float | None = None
    """Bound on a token's loss before the weight is applied; no gradient beyond it. None is off."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            raise ConfigError(
                "distillation.kl_estimator k1 in a loss has zero expected gradient: use k2 or k3."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs", "teacher_weights"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        # A weight of 0 marks tokens that no teacher has scored.
        mask = batch.loss_mask & (batch.columns["teacher_weights"] > 0)
        logprobs = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        teacher = torch.where(mask, batch.columns["teacher_logprobs"], 0.0)
        kl = estimate_kl(logprobs, ref_logprobs=teacher, estimator=self.estimator)
        gap = (logprobs - teacher).detach()
        metrics = {"distill/logprob_gap": weighted_mean(gap, mask)} | _common_metrics(
            kl, clamp=self.clamp, mask=mask, batch=batch
        )
        return LossTerms(
            loss=_clamp(kl, clamp=self.clamp)
            * torch.where(mask, batch.columns["teacher_weights"], 0.0),
            metrics=metrics,
        )


@register_objective("top_k_distillation")
@dataclass(frozen=True, slots=True, kw_only=True)
class TopKObjective(Objective):
    """Divergence between teacher q and policy p over the teacher's top-k tokens.

        forward_kl:      sum q * (log q - log p)
        jensen_shannon:  m * KL(q, M) + (1 - m) * KL(p, M),  M = m * q + (1 - m) * p

    With ``tail`` all other tokens count as one more token that has the remaining probability.

    Source: forward KL: Hinton et al. 2015, arXiv:1503.02531; the mixture: Agarwal et al. 2023,
    arXiv:2306.13649, equation 1.
    """

    divergence: Literal["forward_kl", "jensen_shannon"] = "forward_kl"
    tail: bool = True
    """True to count the probability outside the top-k tokens."""
    mixture: float = 0.5
    """Weight m of the teacher in the mixture; only for jensen_shannon."""
    clamp: float | None = None
    """Bound on a token's loss before the weight is applied; no gradient beyond it. None is off."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB_AT})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({LOGPROB_AT_IDS, "teacher_top_logprobs", "teacher_weights"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        mask = batch.loss_mask & (batch.columns["teacher_weights"] > 0)
        # -inf pads rows in which the teacher named fewer tokens, or named some that the policy
        # lacks.
        is_named = mask[:, None] & batch.columns["teacher_top_logprobs"].isfinite()
        # Mask before any arithmetic: with where() afterwards the gradient would be 0 * NaN = NaN.
        policy = torch.where(is_named, head_outputs[HeadOutput.LOGPROB_AT], 0.0)
        teacher = torch.where(is_named, batch.columns["teacher_top_logprobs"], 0.0)
        terms = torch.where(is_named, self._terms(teacher, policy), 0.0).sum(-1)
        mass = torch.where(is_named, teacher.exp(), 0.0).sum(-1)
        if self.tail:
            rest = [
                torch.log1p(-torch.where(is_named, logs.exp(), 0.0).sum(-1).clamp(max=_MAX_MASS))
                for logs in (teacher, policy)
            ]
            terms = terms + self._terms(rest[0], rest[1])
        terms = torch.where(mask, terms, 0.0)
        metrics = {"distill/top_k_mass": weighted_mean(mass, mask)} | _common_metrics(
            terms, clamp=self.clamp, mask=mask, batch=batch
        )
        return LossTerms(
            loss=_clamp(terms, clamp=self.clamp)
            * torch.where(mask, batch.columns["teacher_weights"], 0.0),
            metrics=metrics,
        )

    def _terms(self, teacher: Tensor, policy: Tensor) -> Tensor:
        """Return the summands of the divergence, from log-probs of teacher and policy."""
        if self.divergence == "forward_kl":
            return teacher.exp() * (teacher - policy)
        p, q, m = policy.exp(), teacher.exp(), self.mixture
        # log(m * q + (1 - m) * p) would be -inf where both probabilities are 0 in float32.
        log_mixture = torch.logaddexp(teacher + math.log(m), policy + math.log1p(-m))
        return m * q * (teacher - log_mixture) + (1.0 - m) * p * (policy - log_mixture)


def compute_teacher_reward(
    logprobs: Tensor,
    *,
    teacher_logprobs: Tensor,
    weights: Tensor,
    loss_mask: Tensor,
    estimator: KlEstimator,
    clamp: float | None,
) -> Tensor:
    """Return the per-token reward -w * clamp(k(log p, log q)), [T] float32.

    It is 0 at untrained tokens and where no teacher gave log-probs. With k1 it is w * (log q - log
    p): if each token is credited with only its own reward, the policy gradient is that of
    KL(policy, teacher).

    Args:
        logprobs: [T] of the policy before this step's first update.
        teacher_logprobs: [T].
        weights: [T] of the teachers.
        loss_mask: [T] bool.
        estimator: k1, k2 or k3.
        clamp: Bound on a token's reward before the weight is applied; None is off.

    Source: Lu 2025, "On-Policy Distillation", Thinking Machines Lab.
    """
    mask = loss_mask & (weights > 0)
    policy, teacher = torch.where(mask, logprobs, 0.0), torch.where(mask, teacher_logprobs, 0.0)
    kl = estimate_kl(policy, ref_logprobs=teacher, estimator=estimator)
    return -torch.where(mask, _clamp(kl, clamp=clamp) * weights, 0.0)


def _clamp(column: Tensor, *, clamp: float | None) -> Tensor:
    # Clamp before the teacher's weight is applied, so that a bound means the same for every
    # teacher.
    return column if clamp is None else column.clamp(-clamp, clamp)


def _common_metrics(
    column: Tensor, *, clamp: float | None, mask: Tensor, batch: SequenceBatch
) -> dict[str, Metric]:
    metrics = {
        "distill/divergence": weighted_mean(column, mask),
        "distill/teacher_token_fraction": weighted_mean(mask, batch.loss_mask),
    }
    if clamp is not None:
        metrics["distill/clamped_fraction"] = weighted_mean(column.detach().abs() > clamp, mask)
    return metrics
