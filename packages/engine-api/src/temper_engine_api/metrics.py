"""A metric is a sum, a weight and a reduction, so that merging over micro-batches, ranks and steps never needs to guess."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number on its way to a log: merged, then read with ``result``."""

    value: float | Tensor
    """The weighted sum (mean), the sum, or the extremum; scalar tensors stay on their device until ``settle``."""
    weight: float | Tensor = 1.0
    """How much stands behind it: tokens, sequences, or updates. A mean of weight zero has no result."""
    reduction: Reduction = "mean"
    """How two of them merge."""

    def merge(self, other: "Metric") -> "Metric":
        """Both together.

        Raises:
            ValueError: their reductions differ.
        """
        if self.reduction != other.reduction:
            raise ValueError(
                f"a metric reduced by {self.reduction} can't merge with one reduced by {other.reduction}."
            )
        if self.reduction in ("mean", "sum"):
            return Metric(
                value=self.value + other.value,
                weight=self.weight + other.weight,
                reduction=self.reduction,
            )
        pick = torch.maximum if self.reduction == "max" else torch.minimum
        value = pick(torch.as_tensor(self.value), torch.as_tensor(other.value))
        return Metric(value=value, weight=self.weight + other.weight, reduction=self.reduction)

    @property
    def result(self) -> float:
        """The number to log: value over weight for a mean (NaN when the weight is zero), else the value."""
        value, weight = float(self.value), float(self.weight)
        if self.reduction == "mean":
            return value / weight if weight else math.nan
        return value


class LazyMetrics(Mapping[str, Metric]):
    """Metrics that are made when they are first looked at: until then nobody waits for the device that computes them.

    Pickled, they are a plain dict.
    """

    def __init__(self, make: Callable[[], Mapping[str, Metric]]) -> None:
        self._make = cache(make)

    def __getitem__(self, name: str) -> Metric:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())

    def __reduce__(self) -> tuple[type[dict[str, Metric]], tuple[dict[str, Metric]]]:
        return dict, (dict(self._make()),)


def weighted_mean(values: Tensor, weights: Tensor) -> Metric:
    """The mean of values [N] under weights [N], both detached, summed in float32; entries of weight zero never leak, not even NaN."""
    weights = weights.detach().float()
    values = torch.where(weights != 0, values.detach().float(), 0.0)
    return Metric(value=(values * weights).sum(), weight=weights.sum(), reduction="mean")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of many micro-batches, ranks or steps as one mapping; a name may be missing from some."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def materialize_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The same metrics as Python floats, moved from their device in one copy."""
    if not metrics:
        return {}
    flat = [
        torch.as_tensor(x, dtype=torch.float64)
        for m in metrics.values()
        for x in (m.value, m.weight)
    ]
    device = next((x.device for x in flat if x.device.type != "cpu"), torch.device("cpu"))
    numbers: list[float] = torch.stack([x.to(device) for x in flat]).tolist()
    pairs = zip(metrics.items(), numbers[0::2], numbers[1::2], strict=True)
    return {name: Metric(value=v, weight=w, reduction=m.reduction) for (name, m), v, w in pairs}
