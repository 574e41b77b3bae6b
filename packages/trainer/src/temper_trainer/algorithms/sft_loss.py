"""Supervised fine-tuning: the negative log-likelihood of demonstrations."""

from dataclasses import dataclass, field

import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)


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
