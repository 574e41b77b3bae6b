"""The value model's loss, and how much variance its predictions explain."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, compute_weighted_mean
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
    """Squared error of the values per trained token, optionally clipped around the old values.

        loss = (V - R)^2 / 2
        loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2   with a clip c

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 9; the clip: Huang et al. 2022, "The 37
    Implementation Details of Proximal Policy Optimization", ICLR blog track, detail 9.
    """

    clip: float | None = None
    """Half-width c of the range around the old value, above 0; None does not clip."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.VALUE})

    @property
    def columns(self) -> frozenset[str]:
        """Column "returns"; with a clip also "values", measured before the first update."""
        return frozenset({"returns"} if self.clip is None else {"returns", "values"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [T] of one micro-batch."""
        mask = batch.loss_mask
        values = torch.where(mask, head_outputs[HeadOutput.VALUE], 0.0)
        returns = torch.where(mask, batch.columns["returns"], 0.0)
        error = (values - returns).square()
        metrics = _moment_metrics(values.detach(), returns=returns, mask=mask)
        if self.clip is not None:
            old = torch.where(mask, batch.columns["values"], 0.0)
            clipped = torch.clamp(values, old - self.clip, old + self.clip)
            clipped_error = (clipped - returns).square()
            metrics["value/clip_fraction"] = compute_weighted_mean(
                clipped_error.detach() > error.detach(), mask
            )
            # Take the larger error: clipping must not reduce the error of a value that is far from
            # its return.
            error = torch.maximum(error, clipped_error)
        return LossTerms(loss=error / 2, metrics=metrics)


def compute_explained_variance(metrics: Mapping[str, Metric]) -> float:
    """Return 1 - Var(R - V) / Var(R), the explained fraction of the returns' variance.

    NaN if the returns do not vary.

    Args:
        metrics: Merged over all micro-batches and ranks; the four ``value/...`` means of this loss
            are read.
    """
    returns, squares, errors, error_squares = (metrics[name].result for name in _MOMENTS)
    spread = squares - returns**2
    return 1.0 - (error_squares - errors**2) / spread if spread > 0 else math.nan


_MOMENTS = (
    "value/return_mean",
    "value/return_square_mean",
    "value/error_mean",
    "value/error_square_mean",
)


def _moment_metrics(values: Tensor, *, returns: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return means that can be merged over micro-batches and ranks; variances cannot."""
    error = returns - values
    columns = (returns, returns.square(), error, error.square())
    return {
        name: compute_weighted_mean(column, mask)
        for name, column in zip(_MOMENTS, columns, strict=True)
    }
