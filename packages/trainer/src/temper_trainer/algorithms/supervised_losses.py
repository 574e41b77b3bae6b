"""Losses on fixed data: SFT, preference optimization (DPO, IPO, hinge) and reward models.

The two sequences of a preference pair have the same ``pack_group_id``, so they are never split.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.types import IS_CHOSEN


@register_objective("sft")
@dataclass(frozen=True, slots=True, kw_only=True)
class SftObjective(Objective):
    """Negative log-likelihood, loss = -log p per trained token.

    The default aggregation is the mean over the trained tokens of the full mini-batch, not per
    rank.
    """

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        loss = -torch.where(batch.loss_mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        return LossTerms(loss=loss, metrics={"sft/nll": weighted_mean(loss, batch.loss_mask)})


def _mean_over_pairs() -> Aggregation:
    return Aggregation(mode=AggregationMode.GROUP_MEAN)


@register_objective("dpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class DpoObjective(Objective):
    """Direct preference optimization: the mean over pairs, half of the loss on each sequence.

    With h = sum log(p / ref) of the chosen completion minus that of the rejected one:

        sigmoid:  -(1 - e) * log sigmoid(beta h) - e * log sigmoid(-beta h),  e = label_smoothing
        ipo:      (h - 1 / (2 * beta))^2, with means over tokens in place of sums
        hinge:    max(0, 1 - beta * h)

    plus sft_coef * the chosen completion's mean negative log-likelihood.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing: Mitchell 2023, "A
    note on DPO with noisy preferences"; IPO: Azar et al. 2023, arXiv:2310.12036, equation 17;
    hinge: Zhao et al. 2023, arXiv:2305.10425; the added likelihood: Pang et al. 2024,
    arXiv:2404.19733.
    """

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: float = 0.1
    """Strength of the regularization toward the reference, above 0."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels, in [0, 0.5]; only for sigmoid."""
    length_normalized: bool = False
    """True to use means over a completion's tokens in place of sums; ipo always does."""
    has_reference: bool = True
    """False uses no reference: its log-probs count as 0."""
    sft_coef: float = 0.0
    """Weight of the chosen completion's mean negative log-likelihood."""
    aggregation: Aggregation = field(default_factory=_mean_over_pairs)
    """Must be group_mean, the mean over pairs."""

    def __post_init__(self) -> None:
        if self.aggregation.mode != AggregationMode.GROUP_MEAN:
            raise ConfigError(
                f"the aggregation of dpo is {self.aggregation.mode.value}, but must be "
                "group_mean, the mean over pairs."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        """is_chosen, and ref_logprobs if there is a reference."""
        return frozenset({IS_CHOSEN, "ref_logprobs"} if self.has_reference else {IS_CHOSEN})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [B] of one micro-batch, which must contain complete pairs."""
        mask = batch.loss_mask
        logprobs = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        reference = (
            torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            if self.has_reference
            else torch.zeros_like(logprobs)
        )
        # At least 1, because a dummy sequence has no trained token.
        trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
        total = sum_per_sequence(logprobs - reference, batch)
        log_ratio = total / trained if self.length_normalized or self.loss == "ipo" else total
        is_chosen = batch.sequence_columns[IS_CHOSEN]
        margin = compute_pair_difference(log_ratio, batch)
        # Both sequences of a pair have the same margin, so each carries half of the pair's loss.
        loss = 0.5 * self._loss(margin)
        if self.sft_coef:
            likelihood = sum_per_sequence(logprobs, batch) / trained
            loss = loss - self.sft_coef * torch.where(is_chosen, likelihood, 0.0)
        # Ranks without samples run a dummy sequence, which must not count in the metrics.
        real = ~batch.is_dummy
        metrics = {
            "preference/accuracy": weighted_mean((margin > 0).float(), real),
            "preference/margin": weighted_mean(self.beta * margin, real),
            "preference/chosen_reward": weighted_mean(self.beta * log_ratio, real & is_chosen),
            "preference/rejected_reward": weighted_mean(self.beta * log_ratio, real & ~is_chosen),
        }
        return LossTerms(loss=loss, level="sequence", metrics=metrics)

    def _loss(self, margin: Tensor) -> Tensor:
        if self.loss == "ipo":
            return (margin - 1.0 / (2.0 * self.beta)).square()
        scaled = self.beta * margin
        if self.loss == "hinge":
            return torch.relu(1.0 - scaled)
        log_sigmoid = torch.nn.functional.logsigmoid
        return -(1.0 - self.label_smoothing) * log_sigmoid(
            scaled
        ) - self.label_smoothing * log_sigmoid(-scaled)


@register_objective("reward_model")
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelObjective(Objective):
    """Bradley-Terry loss on scores; the loss is the mean over pairs, half of it on each sequence.

        loss = -(1 - e) * log sigmoid(s_c - s_r) - e * log sigmoid(s_r - s_c)
               + center_coef * (s_c + s_r)^2

    s_c and s_r are the scores of the chosen and the rejected completion, and e is label_smoothing.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; centering: Eisenstein et al. 2023,
    arXiv:2312.09244, section 2.
    """

    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels, in [0, 0.5]."""
    center_coef: float = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near 0."""
    aggregation: Aggregation = field(default_factory=_mean_over_pairs)
    """Must be group_mean, the mean over pairs."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.SCORE})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({IS_CHOSEN})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [B] of one micro-batch, which must contain complete pairs."""
        scores, is_chosen = head_outputs[HeadOutput.SCORE], batch.sequence_columns[IS_CHOSEN]
        margin = compute_pair_difference(scores, batch)
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = -(1.0 - self.label_smoothing) * log_sigmoid(
            margin
        ) - self.label_smoothing * log_sigmoid(-margin)
        if self.center_coef:
            loss = loss + self.center_coef * _sum_over_pair(scores, batch).square()
        real = ~batch.is_dummy
        metrics = {
            "preference/accuracy": weighted_mean((margin > 0).float(), real),
            "preference/margin": weighted_mean(margin, real),
            "preference/chosen_score": weighted_mean(scores, real & is_chosen),
            "preference/rejected_score": weighted_mean(scores, real & ~is_chosen),
        }
        return LossTerms(loss=0.5 * loss, level="sequence", metrics=metrics)


def compute_pair_difference(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return [B] the chosen sequence's entry minus the rejected one's, on both sequences of a pair.

    Gradients flow through the difference.
    """
    return _sum_over_pair(torch.where(batch.sequence_columns[IS_CHOSEN], column, -column), batch)


def _sum_over_pair(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return [B] the sum over the two sequences of each pair, on both of them."""
    pairs, pair_index = torch.unique(batch.pack_group_ids, return_inverse=True)
    return column.new_zeros(len(pairs)).index_add(0, pair_index, column)[pair_index]
