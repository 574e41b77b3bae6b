"""An objective that adds several objectives in one update."""

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
    """Weighted sum of objectives, token by token: loss = sum_i coefs[i] * parts[i]."""

    parts: tuple[Objective, ...]
    """Objectives with per-token losses and the same aggregation."""
    coefs: tuple[float, ...]
    """One weight per part."""
    aggregation: Aggregation

    def __post_init__(self) -> None:
        if (
            len(self.parts) != len(self.coefs)
            or not self.parts
            or any(part.aggregation != self.aggregation for part in self.parts)
        ):
            raise ConfigError(
                "a combined objective needs one coef per part and the same aggregation "
                f"everywhere, but is {self}."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Union of the parts' required outputs."""
        return frozenset().union(*(part.required_outputs for part in self.parts))

    @property
    def columns(self) -> frozenset[str]:
        """Union of the parts' columns."""
        return frozenset().union(*(part.columns for part in self.parts))

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Return the columns that the parts prepare."""
        return {
            name: column
            for part in self.parts
            for name, column in part.prepare(batch, seed=seed).items()
        }

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the weighted sum [T] of the parts' losses for one micro-batch."""
        total = torch.zeros(batch.num_tokens, device=batch.tokens.device)
        metrics: dict[str, Metric] = {}
        for part, coef in zip(self.parts, self.coefs, strict=True):
            terms = part(head_outputs, batch)
            if terms.level != "token":
                raise ConfigError(
                    f"objective {part.name!r} returns one loss per sequence, and cannot be added "
                    "to per-token losses."
                )
            total = total + coef * (
                terms.loss if terms.weight is None else terms.loss * terms.weight
            )
            metrics |= terms.metrics
        return LossTerms(loss=total, metrics=metrics)
