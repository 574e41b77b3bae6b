"""Objectives with which a law asks one question: the mean likelihood, and a witness of how micro-batches were cut."""

from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import (
    Aggregation,
    Answers,
    LossTerms,
    Objective,
    Query,
    register_objective,
)

WITNESS_PREFIX = "saw "
"""Of the metrics that say which micro-batches an objective saw."""


@register_objective("probe_likelihood")
@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodProbe(Objective):
    """Supervised fine-tuning: loss_t = -logprobs_t."""

    aggregation: Aggregation = field(default_factory=Aggregation)
    """How its terms are reduced."""

    @property
    @override
    def needs(self) -> frozenset[Query]:
        return frozenset({Query.LOGPROB})

    @override
    def __call__(self, answers: Answers, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=-answers[Query.LOGPROB])


@register_objective("probe_plan_witness")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWitness(Objective):
    """The same loss; every micro-batch that it sees becomes a metric named after the samples in it."""

    aggregation: Aggregation = field(default_factory=Aggregation)
    """How its terms are reduced."""

    @property
    @override
    def needs(self) -> frozenset[Query]:
        return frozenset({Query.LOGPROB})

    @override
    def __call__(self, answers: Answers, batch: SequenceBatch) -> LossTerms:
        seen = Metric(value=1.0, reduction="sum")
        return LossTerms(loss=-answers[Query.LOGPROB], metrics={witness_of(batch.sample_ids): seen})


def witness_of(sample_ids: Tensor) -> str:
    """Name of the metric of a micro-batch with these samples, in this order."""
    return WITNESS_PREFIX + ",".join(str(sample) for sample in sample_ids.tolist())
