"""Metrics that merge exactly over micro-batches, ranks and steps.

A metric stores a sum, a weight and its reduction, so that a mean of means is weighted correctly.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.distributed.gatherable import gatherable

Reduction = Literal["mean", "sum", "max", "min"]


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A mergeable number; read it with `result`.

    Example:
        >>> first = Metric(value=6.0, weight=3.0)  # the mean over 3 tokens is 2
        >>> second = Metric(value=5.0, weight=1.0)
        >>> first.merge(second).result
        2.75
    """

    value: float | Tensor
    """Weighted sum (for a mean), sum, or extremum. A scalar tensor stays on its device until
    `materialize_metrics`."""
    weight: float | Tensor = 1.0
    """Sum of weights, such as a token count. A mean of weight 0 is NaN."""
    reduction: Reduction = "mean"

    def merge(self, other: "Metric") -> "Metric":
        """Return both metrics merged.

        Raises:
            ValueError: If the reductions differ.
        """
        if self.reduction != other.reduction:
            raise ValueError(
                f"can't merge a metric reduced by {self.reduction} with one reduced by "
                f"{other.reduction}: use the same reduction wherever the metric is made."
            )
        if self.reduction in ("mean", "sum"):
            return Metric(
                value=self.value + other.value,
                weight=self.weight + other.weight,
                reduction=self.reduction,
            )
        # torch.maximum and not max(), which would read tensors from the device and can lose NaN.
        pick = torch.maximum if self.reduction == "max" else torch.minimum
        value = pick(torch.as_tensor(self.value), torch.as_tensor(other.value))
        return Metric(value=value, weight=self.weight + other.weight, reduction=self.reduction)

    @property
    def result(self) -> float:
        """Number to log: value / weight for a mean (NaN if the weight is 0), else the value."""
        value, weight = float(self.value), float(self.weight)
        if self.reduction == "mean":
            return value / weight if weight else math.nan
        return value


class LazyMetrics(Mapping[str, Metric]):
    """Metrics that are computed at the first access.

    Reading a metric from a device blocks the host; until the first access the host can run ahead.
    Pickles as a plain dict.
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
        # The function that computes the metrics may be a closure, which cannot be pickled.
        return dict, (dict(self._make()),)


def compute_weighted_mean(values: Tensor, weights: Tensor) -> Metric:
    """Return the weighted mean of values [N] as a metric, summed in float32, detached.

    Entries of weight 0 are ignored, even if NaN.
    """
    weights = weights.detach().float()
    values = torch.where(weights != 0, values.detach().float(), 0.0)
    return Metric(value=(values * weights).sum(), weight=weights.sum(), reduction="mean")


def compute_load_metrics(loads: Tensor) -> dict[str, Metric]:
    """Return metrics for how evenly a MoE model's routers load its experts.

    Args:
        loads: [layers, E] tokens per layer and expert, summed across ranks.

    Returns:
        `router/max_load`: an expert's largest load divided by its layer's mean load, averaged
        across layers; 1 is even. `router/max_load_of_worst_layer`: the same, largest layer.
        `router/idle_experts`: fraction of experts without a token, across all layers.

    Example:
        >>> metrics = compute_load_metrics(torch.tensor([[2.0, 2.0], [4.0, 0.0]]))
        >>> {name: metric.result for name, metric in metrics.items()}
        {'router/max_load': 1.5, 'router/max_load_of_worst_layer': 2.0, 'router/idle_experts': 0.25}
    """
    mean = loads.mean(dim=1)
    # Without tokens there is no load: 0 instead of 0 / 0.
    relative = torch.where(mean > 0, loads.amax(dim=1) / mean, 0.0)
    return {
        "router/max_load": Metric(value=relative.mean()),
        "router/max_load_of_worst_layer": Metric(value=relative.max(), reduction="max"),
        "router/idle_experts": Metric(value=(loads == 0).float().mean()),
    }


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics by name; a name may be missing from some mappings."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def materialize_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Convert tensors in metrics to Python floats with a single device-to-host copy."""
    if not metrics:
        return {}
    flat = [
        # float64 holds every float32 value and every count of tokens exactly.
        torch.as_tensor(x, dtype=torch.float64)
        for m in metrics.values()
        for x in (m.value, m.weight)
    ]
    device = next((x.device for x in flat if x.device.type != "cpu"), torch.device("cpu"))
    numbers: list[float] = torch.stack([x.to(device) for x in flat]).tolist()
    pairs = zip(metrics.items(), numbers[0::2], numbers[1::2], strict=True)
    return {name: Metric(value=v, weight=w, reduction=m.reduction) for (name, m), v, w in pairs}
