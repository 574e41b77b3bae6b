"""Objectives for SFT and reward models.

The two sequences of a preference pair have the same ``pack_group_id``, so they are never split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import compute_weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_trainer.algorithms.objectives.policy_objective import measure_entropy
from temper_trainer.algorithms.objectives.preference_objective import make_group_mean
from temper_trainer.algorithms.preference_losses.preference_loss import (
    compute_pair_difference,
    measure_order,
    sum_over_pair,
)
from temper_trainer.algorithms.sft_losses import CrossEntropy, SftLoss
from temper_trainer.types import IS_CHOSEN, LOSS_WEIGHTS, MARGIN

SCALED_LOSS_WEIGHTS = "scaled_loss_weights"
"""Name of the [T] float32 column with loss weights whose mean over the mini-batch is 1."""


@register_objective("sft")
@dataclass(frozen=True, slots=True, kw_only=True)
class SftObjective(Objective):
    """Train on demonstrations with an SFT loss per trained token.

    The default aggregation is the mean over the trained tokens of the full mini-batch, not per
    rank. With weights it is their weighted mean:

        loss = sum over tokens of w * l / sum over tokens of w
    """

    loss: SftLoss = field(default_factory=CrossEntropy)
    """Computes the loss per token."""
    has_weights: bool = False
    """True to read the column loss_weights."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs, and the entropy as a metric."""
        return frozenset({HeadOutput.LOGPROB, HeadOutput.ENTROPY})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({SCALED_LOSS_WEIGHTS} if self.has_weights else ())

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Return the loss weights, scaled so that their mean over the trained tokens is 1.

        The engine divides the loss by the number of trained tokens, which is then the sum of the
        weights. Without loss weights, return no column.
        """
        if not self.has_weights:
            return {}
        # In float64, because the sum may have millions of terms.
        weights = torch.where(batch.loss_mask, batch.columns[LOSS_WEIGHTS], 0.0).double()
        total = float(weights.sum())
        # All trained tokens have weights above 0, so the sum is 0 only if no token is trained.
        scale = float(batch.loss_mask.sum()) / total if total > 0 else 0.0
        return {SCALED_LOSS_WEIGHTS: (weights * scale).float()}

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        logprobs = torch.where(batch.loss_mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        # The likelihood also with another loss, so that curves can be compared.
        metrics = {"sft/nll": compute_weighted_mean(-logprobs, batch.loss_mask)}
        metrics |= measure_entropy(head_outputs, mask=batch.loss_mask)
        weight = batch.columns[SCALED_LOSS_WEIGHTS] if self.has_weights else None
        return LossTerms(loss=self.loss.compute_losses(logprobs), weight=weight, metrics=metrics)


@register_objective("reward_model")
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelObjective(Objective):
    """Bradley-Terry loss on scores; the loss is the mean over pairs, half of it on each sequence.

        loss = -(1 - e) * log sigmoid(s_c - s_r - m) - e * log sigmoid(s_r - s_c - m)
               + center_coef * (s_c + s_r)^2

    s_c and s_r are the scores of the chosen and the rejected completion, e is label_smoothing, and
    m is the pair's margin, if there is one.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; margin: Touvron et al. 2023,
    arXiv:2307.09288, equation 2; centering: Eisenstein et al. 2023, arXiv:2312.09244, section 2.
    """

    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels, in [0, 0.5]."""
    center_coef: float = 0.0
    """Weight of a pair's squared score sum, which keeps scores near 0."""
    has_margin: bool = False
    """True to read the column margin."""
    aggregation: Aggregation = field(default_factory=make_group_mean)
    """Must be group_mean, the mean over pairs."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.SCORE})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({IS_CHOSEN, MARGIN} if self.has_margin else {IS_CHOSEN})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [B] of one micro-batch, which must contain complete pairs."""
        scores, is_chosen = head_outputs[HeadOutput.SCORE], batch.sequence_columns[IS_CHOSEN]
        difference = compute_pair_difference(scores, batch)
        log_sigmoid = torch.nn.functional.logsigmoid
        margin = batch.sequence_columns[MARGIN] if self.has_margin else 0.0
        loss = -(1.0 - self.label_smoothing) * log_sigmoid(difference - margin)
        if self.label_smoothing:
            # With swapped labels the other completion should be better by the same margin.
            loss = loss - self.label_smoothing * log_sigmoid(-difference - margin)
        if self.center_coef:
            loss = loss + self.center_coef * sum_over_pair(scores, batch).square()
        real = ~batch.is_dummy
        metrics = {
            "preference/accuracy": compute_weighted_mean(measure_order(difference), real),
            "preference/margin": compute_weighted_mean(difference, real),
            "preference/chosen_score": compute_weighted_mean(scores, real & is_chosen),
            "preference/rejected_score": compute_weighted_mean(scores, real & ~is_chosen),
        }
        return LossTerms(loss=0.5 * loss, level="sequence", metrics=metrics)
