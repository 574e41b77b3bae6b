"""Losses on fixed data: SFT, DPO and reward models."""

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
    """loss = -log p per trained token; by default the mean over the trained tokens of the whole mini-batch, never of each rank."""

    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs."""
        return frozenset({HeadOutput.LOGPROB})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        loss = -torch.where(batch.loss_mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        return LossTerms(loss=loss, metrics={"sft/nll": weighted_mean(loss, batch.loss_mask)})


def _per_pair() -> Aggregation:
    return Aggregation(mode=AggregationMode.GROUP_MEAN)


@register_objective("dpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class DpoObjective(Objective):
    """Direct preference optimisation; the loss is the mean over pairs, each member carrying half of its pair's.

    With h = sum log(p / ref) of the chosen completion less that of the rejected one:

        sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e the label smoothing
        ipo: (h - 1 / (2 beta))^2, with means in place of sums
        hinge: max(0, 1 - beta h)

    plus sft_coef * the chosen completion's mean negative log-likelihood.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing: Mitchell 2023, "A note on DPO with noisy preferences"; IPO:
    Azar et al. 2023, arXiv:2310.12036, equation 17; hinge: Zhao et al. 2023, arXiv:2305.10425; the added likelihood: Pang et al. 2024,
    arXiv:2404.19733.
    """

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Which."""
    beta: float = 0.1
    """Strength of the tie to the reference."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round; only for sigmoid."""
    length_normalized: bool = False
    """Means over a completion's tokens in place of sums; ipo always takes them."""
    has_reference: bool = True
    """False leaves the reference out: its log-probs count as 0."""
    sft_coef: float = 0.0
    """Weight of the chosen completion's likelihood."""
    aggregation: Aggregation = field(default_factory=_per_pair)
    """group_mean: over pairs."""

    def __post_init__(self) -> None:
        if self.aggregation.mode != AggregationMode.GROUP_MEAN:
            raise ConfigError(
                f"dpo is a mean over pairs (group_mean), but aggregation is {self.aggregation.mode.value}."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs."""
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        """is_chosen, and the reference's log-probs where there is one."""
        return frozenset({IS_CHOSEN, "ref_logprobs"} if self.has_reference else {IS_CHOSEN})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[B] losses of one micro-batch of whole pairs."""
        mask = batch.loss_mask
        logprobs = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        reference = (
            torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            if self.has_reference
            else torch.zeros_like(logprobs)
        )
        trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
        total = sum_per_sequence(logprobs - reference, batch)
        log_ratio = total / trained if self.length_normalized or self.loss == "ipo" else total
        is_chosen = batch.sequence_columns[IS_CHOSEN]
        margin = compute_pair_difference(log_ratio, batch)
        loss = 0.5 * self._loss(margin)
        if self.sft_coef:
            likelihood = sum_per_sequence(logprobs, batch) / trained
            loss = loss - self.sft_coef * torch.where(is_chosen, likelihood, 0.0)
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
    """Bradley-Terry on scores; the loss is the mean over pairs, each member carrying half of its pair's.

    loss = -(1 - e) log sigmoid(s_chosen - s_rejected) - e log sigmoid(s_rejected - s_chosen) + center_coef * (s_chosen + s_rejected)^2.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; centering: Eisenstein et al. 2023, arXiv:2312.09244, section 2.
    """

    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round."""
    center_coef: float = 0.0
    """Weight of the squared sum, which keeps scores around 0."""
    aggregation: Aggregation = field(default_factory=_per_pair)
    """group_mean: over pairs."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Scores."""
        return frozenset({HeadOutput.SCORE})

    @property
    def columns(self) -> frozenset[str]:
        """is_chosen."""
        return frozenset({IS_CHOSEN})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[B] losses of one micro-batch of whole pairs."""
        scores, is_chosen = head_outputs[HeadOutput.SCORE], batch.sequence_columns[IS_CHOSEN]
        margin = compute_pair_difference(scores, batch)
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = -(1.0 - self.label_smoothing) * log_sigmoid(
            margin
        ) - self.label_smoothing * log_sigmoid(-margin)
        if self.center_coef:
            loss = loss + self.center_coef * _over_pair(scores, batch).square()
        real = ~batch.is_dummy
        metrics = {
            "preference/accuracy": weighted_mean((margin > 0).float(), real),
            "preference/margin": weighted_mean(margin, real),
            "preference/chosen_score": weighted_mean(scores, real & is_chosen),
            "preference/rejected_score": weighted_mean(scores, real & ~is_chosen),
        }
        return LossTerms(loss=0.5 * loss, level="sequence", metrics=metrics)


def compute_pair_difference(column: Tensor, batch: SequenceBatch) -> Tensor:
    """[B] the chosen sequence's entry less the rejected one's, on both members of each pair, with gradient."""
    return _over_pair(torch.where(batch.sequence_columns[IS_CHOSEN], column, -column), batch)


def _over_pair(column: Tensor, batch: SequenceBatch) -> Tensor:
    """[B] sum over the sequences of each pair, on both members."""
    pairs, place = torch.unique(batch.pack_group_ids, return_inverse=True)
    return column.new_zeros(len(pairs)).index_add(0, place, column)[place]
