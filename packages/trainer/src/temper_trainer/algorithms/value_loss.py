"""The value model's objective: squared distance to the returns, optionally within a range around the old values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)


@register_objective("value")
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective(Objective):
    """Squared error per trained token.

    loss = (V - R)^2 / 2, or with a clip c the larger of that and (clip(V, V_old - c, V_old + c) - R)^2 / 2.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 9; the clip: Huang et al. 2022, "The 37 Implementation Details of Proximal
    Policy Optimization", ICLR blog track, detail 9.
    """

    clip: float | None = None
    """Range around the old value within which the loss follows; None is off, and then the column values is not read."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses become one number."""

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Values."""
        return frozenset({HeadOutput.VALUE})

    @property
    def columns(self) -> frozenset[str]:
        """returns; values (before this step's first update) where there is a clip."""
        return frozenset({"returns"} if self.clip is None else {"returns", "values"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """[T] losses of one micro-batch."""
        mask = batch.loss_mask
        values = torch.where(mask, head_outputs[HeadOutput.VALUE], 0.0)
        returns = torch.where(mask, batch.columns["returns"], 0.0)
        error = (values - returns).square()
        metrics = _variance_pieces(values.detach(), returns=returns, mask=mask)
        if self.clip is not None:
            old = torch.where(mask, batch.columns["values"], 0.0)
            near = torch.clamp(values, old - self.clip, old + self.clip)
            held = (near - returns).square()
            metrics["value/clip_fraction"] = weighted_mean(held.detach() > error.detach(), mask)
            error = torch.maximum(error, held)
        return LossTerms(loss=error / 2, metrics=metrics)


def compute_explained_variance(metrics: Mapping[str, Metric]) -> float:
    """Share of the returns' variance that the values account for: 1 - Var(R - V) / Var(R); NaN where the returns don't vary.

    Args:
        metrics: merged over all micro-batches and ranks; the four ``value/...`` means of this objective are read.
    """
    returns, squares, errors, error_squares = (metrics[name].result for name in _PIECES)
    spread = squares - returns**2
    return 1.0 - (error_squares - errors**2) / spread if spread > 0 else math.nan


_PIECES = (
    "value/return_mean",
    "value/return_square_mean",
    "value/error_mean",
    "value/error_square_mean",
)


def _variance_pieces(values: Tensor, *, returns: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Means that merge over micro-batches and ranks, from which a variance can be made afterwards."""
    error = returns - values
    columns = (returns, returns.square(), error, error.square())
    return {
        name: weighted_mean(column, mask) for name, column in zip(_PIECES, columns, strict=True)
    }
