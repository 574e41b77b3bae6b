"""The objective of distillation: a distillation loss with mask, clamp and weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.objective import (
    LOGPROB_AT_IDS,
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.distillation_losses.sampled_token_losses import (
    ReverseKl,
)
from temper_trainer.algorithms.objectives.policy_objective import CORRECTION_WEIGHTS


@register_objective("distillation")
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationObjective(Objective):
    """Train a policy toward the teachers.

        loss = c * w * clamp(divergence)

    per trained token, with the teacher's weight w and the weight c of the rollout correction. The
    divergence assumes that the policy has drawn the tokens. If the sampler's probabilities differ
    from the trainer's, c corrects for that, as in the policy loss. c is 0 at tokens that the
    correction rejects.
    """

    loss: DistillationLoss = field(default_factory=ReverseKl)
    """Computes the divergence."""
    clamp: float | None = None
    """Bound on a token's loss before the weight is applied; no gradient beyond it. None is off."""
    uses_correction_weights: bool = False
    """True to multiply the loss with the column correction_weights."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB_AT if self._reads_top_k else HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the batch that the loss reads, given its settings."""
        read = (
            {LOGPROB_AT_IDS, "teacher_top_logprobs"} if self._reads_top_k else {"teacher_logprobs"}
        )
        read |= {CORRECTION_WEIGHTS} if self.uses_correction_weights else set()
        return frozenset(read | {"teacher_weights"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        # A weight of 0 marks tokens that no teacher has scored.
        mask = batch.loss_mask & (batch.columns["teacher_weights"] > 0)
        if self._reads_top_k:
            policy = head_outputs[HeadOutput.LOGPROB_AT]
            teacher = torch.where(mask[:, None], batch.columns["teacher_top_logprobs"], -torch.inf)
            metrics = {"distill/top_k_mass": compute_weighted_mean(teacher.exp().sum(-1), mask)}
        else:
            # Mask before any arithmetic: with where() afterwards the gradient would be NaN.
            policy = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
            teacher = torch.where(mask, batch.columns["teacher_logprobs"], 0.0)
            gap = (policy - teacher).detach()
            metrics = {"distill/logprob_gap": compute_weighted_mean(gap, mask)}
        divergence = torch.where(mask, self.loss.measure(policy, teacher=teacher), 0.0)
        weights = torch.where(mask, batch.columns["teacher_weights"], 0.0)
        if self.uses_correction_weights:
            weights = weights * torch.where(mask, batch.columns[CORRECTION_WEIGHTS], 0.0)
        metrics |= _common_metrics(divergence, clamp=self.clamp, mask=mask, batch=batch)
        return LossTerms(loss=_clamp(divergence, clamp=self.clamp) * weights, metrics=metrics)

    @property
    def _reads_top_k(self) -> bool:
        return self.loss.num_teacher_tokens > 0


def compute_teacher_reward(
    logprobs: Tensor,
    *,
    teacher_logprobs: Tensor,
    weights: Tensor,
    loss_mask: Tensor,
    loss: DistillationLoss,
    clamp: float | None,
) -> Tensor:
    """Return the per-token reward -w * clamp(k(log p, log q)), [T] float32.

    It is 0 at untrained tokens and where no teacher gave log-probs.

    Args:
        logprobs: [T] of the policy before this step's first update.
        teacher_logprobs: [T].
        weights: [T] of the teachers.
        loss_mask: [T] bool.
        loss: The distillation loss; it computes the estimator k of the divergence.
        clamp: Bound on a token's reward before the weight is applied; None is off.
    """
    mask = loss_mask & (weights > 0)
    policy, teacher = torch.where(mask, logprobs, 0.0), torch.where(mask, teacher_logprobs, 0.0)
    kl = loss.measure(policy, teacher=teacher)
    return -torch.where(mask, _clamp(kl, clamp=clamp) * weights, 0.0)


def _clamp(divergence: Tensor, *, clamp: float | None) -> Tensor:
    # Clamp before the teacher's weight is applied, so that a bound means the same for every
    # teacher.
    return divergence if clamp is None else divergence.clamp(-clamp, clamp)


def _common_metrics(
    divergence: Tensor, *, clamp: float | None, mask: Tensor, batch: SequenceBatch
) -> dict[str, Metric]:
    metrics = {
        "distill/divergence": compute_weighted_mean(divergence, mask),
        "distill/teacher_token_fraction": compute_weighted_mean(mask, batch.loss_mask),
    }
    if clamp is not None:
        metrics["distill/clamped_fraction"] = compute_weighted_mean(
            divergence.detach().abs() > clamp, mask
        )
    return metrics
