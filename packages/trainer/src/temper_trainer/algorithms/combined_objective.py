"""Several objectives in one update, as a weighted sum of their per-token losses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)


@register_objective("combined")
@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedObjective(Objective):
    """loss = sum over i of coefs[i] * parts[i], token by token; all parts share the aggregation."""

    parts: tuple[Objective, ...]
    """Objectives whose losses are per token."""
    coefs: tuple[float, ...]
    """Their weights."""
    aggregation: Aggregation
    """How the sum becomes one number."""

    def __post_init__(self) -> None:
        if (
            len(self.parts) != len(self.coefs)
            or not self.parts
            or any(part.aggregation != self.aggregation for part in self.parts)
        ):
            raise ConfigError(
                f"a combined objective needs as many coefs as parts, and one aggregation for all, but is {self}."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """What any part asks."""
        return frozenset().union(*(part.required_outputs for part in self.parts))

    @property
    def columns(self) -> frozenset[str]:
        """What any part reads."""
        return frozenset().union(*(part.columns for part in self.parts))

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """What every part prepares."""
        return {
            name: column
            for part in self.parts
            for name, column in part.prepare(batch, seed=seed).items()
        }

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        total = torch.zeros(batch.num_tokens, device=batch.tokens.device)
        metrics: dict[str, Metric] = {}
        for part, coef in zip(self.parts, self.coefs, strict=True):
            terms = part(head_outputs, batch)
            if terms.level != "token":
                raise ConfigError(
                    f"objective {part.name!r} returns one loss per sequence, and can't be combined with losses per token."
                )
            total = total + coef * (
                terms.loss if terms.weight is None else terms.loss * terms.weight
            )
            metrics |= terms.metrics
        return LossTerms(loss=total, metrics=metrics)
