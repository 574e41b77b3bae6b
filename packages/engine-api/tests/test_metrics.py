"""Test that metrics merge to the same result in any grouping."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.metrics import (
    LazyMetrics,
    Metric,
    Reduction,
    compute_weighted_mean,
    materialize_metrics,
    merge_metrics,
)

VALUES = st.lists(st.integers(-100, 100), min_size=1, max_size=12)
EXPECTED = {"mean": lambda v: sum(v) / len(v), "sum": sum, "max": max, "min": min}


@given(values=VALUES, reduction=st.sampled_from(["mean", "sum", "max", "min"]), data=st.data())
def test_merging_in_any_grouping_gives_the_same(
    values: list[int], reduction: Reduction, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(values)))
    parts = [{"m": Metric(value=float(v), reduction=reduction)} for v in values]
    grouped = merge_metrics([merge_metrics(parts[:cut]), merge_metrics(parts[cut:])])
    assert grouped["m"].result == pytest.approx(EXPECTED[reduction](values))


def test_a_mean_is_weighted_by_what_stands_behind_it() -> None:
    ranks = [{"kl": Metric(value=3.0, weight=1.0)}, {"kl": Metric(value=3.0, weight=5.0)}]
    assert merge_metrics(ranks)["kl"].result == 1.0  # (3 + 3) / (1 + 5), not (3 + 0.6) / 2


def test_a_mean_of_nothing_is_not_a_number() -> None:
    assert math.isnan(Metric(value=0.0, weight=0.0).result)


def test_different_reductions_do_not_merge() -> None:
    with pytest.raises(
        ValueError, match="can't merge a metric reduced by sum with one reduced by max"
    ):
        Metric(value=1.0, reduction="sum").merge(Metric(value=1.0, reduction="max"))


def test_a_name_may_be_missing_from_some_ranks() -> None:
    merged = merge_metrics(
        [{"a": Metric(value=1.0, reduction="sum")}, {}, {"a": Metric(value=2.0, reduction="sum")}]
    )
    assert merged["a"].result == 3.0


def test_entries_of_weight_zero_never_leak() -> None:
    metric = compute_weighted_mean(torch.tensor([2.0, float("nan"), 4.0]), torch.tensor([1, 0, 3]))
    assert metric.result == 3.5  # (2 + 12) / 4


def test_a_weighted_mean_carries_no_graph() -> None:
    values = torch.ones(2, requires_grad=True)
    metric = compute_weighted_mean(values * 2, torch.ones(2))
    assert isinstance(metric.value, torch.Tensor)
    assert not metric.value.requires_grad


def test_settling_makes_floats_of_tensors_and_keeps_the_reduction() -> None:
    settled = materialize_metrics(
        {
            "a": Metric(value=torch.tensor(2.5), weight=torch.tensor(2), reduction="max"),
            "b": Metric(value=3),
        }
    )
    assert settled == {
        "a": Metric(value=2.5, weight=2.0, reduction="max"),
        "b": Metric(value=3.0, weight=1.0),
    }
    assert materialize_metrics({}) == {}


def test_late_metrics_are_made_once_when_they_are_first_read() -> None:
    made: list[int] = []

    def make() -> dict[str, Metric]:
        made.append(1)
        return {"loss": Metric(value=6.0, weight=2.0)}

    late = LazyMetrics(make)
    assert not made
    assert late["loss"].result == 3.0
    assert (list(late), len(late), len(made)) == (["loss"], 1, 1)


def test_late_metrics_travel_as_a_plain_dict() -> None:
    arrived = pickle.loads(
        pickle.dumps(LazyMetrics(lambda: {"loss": Metric(value=6.0, weight=2.0)}))
    )
    assert type(arrived) is dict
    assert arrived["loss"].result == 3.0
