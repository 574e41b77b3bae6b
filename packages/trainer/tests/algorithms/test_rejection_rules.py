"""Rejection rules of rollout correction: by ratio and by KL, token by token and by completion."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.rejection_rules import (
    KlRule,
    RatioRule,
    RejectionRule,
    apply_rejection_rules,
)

NAN = math.nan
LOG_RATIOS = ([NAN, 0.5, -1.0, 0.0], [NAN, 0.25, 0.25, NAN, 0.25])
"""Ratios e^0.5 = 1.648721, e^-1 = 0.367879, 1 with the product e^-0.5 = 0.606531 and the geometric
mean e^(-1/6) = 0.846482; and three times e^0.25 = 1.284025 with the product e^0.75 = 2.117."""


def samples_of(*columns: list[float]) -> tuple[SequenceBatch, Tensor]:
    tensors = [torch.tensor(column) for column in columns]
    samples = from_sequences(
        [torch.arange(len(column)) for column in columns],
        loss_masks=[~tensor.isnan() for tensor in tensors],
    )
    return samples, torch.cat(tensors)


def kept(*rules: RejectionRule) -> list[list[int]]:
    """Return 1 for kept and 0 for rejected trained tokens of both completions."""
    samples, log_ratio = samples_of(*LOG_RATIOS)
    is_kept = apply_rejection_rules(rules, log_ratio=log_ratio, samples=samples).is_kept
    assert not bool(is_kept[~samples.loss_mask].any())
    trained = is_kept[samples.loss_mask].int().tolist()
    return [trained[:3], trained[3:]]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (RatioRule(low=0.5, high=1.6), [[0, 0, 1], [1, 1, 1]]),
        (RatioRule(high=1.2), [[0, 1, 1], [0, 0, 0]]),
        (RatioRule(over="sum", low=0.61), [[0, 0, 0], [1, 1, 1]]),
        (RatioRule(over="sum", low=0.60, high=2.1), [[1, 1, 1], [0, 0, 0]]),
        (RatioRule(over="mean", low=0.85), [[0, 0, 0], [1, 1, 1]]),
        (RatioRule(over="mean", low=0.84, high=1.28), [[1, 1, 1], [0, 0, 0]]),
        (RatioRule(over="max", low=0.37), [[0, 0, 0], [1, 1, 1]]),
        (RatioRule(over="max", low=0.36, high=1.65), [[1, 1, 1], [1, 1, 1]]),
        (RatioRule(over="max", high=1.64), [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_ratio_bounds_tokens_products_geometric_means_and_outliers(
    rule: RatioRule, expected: list[list[int]]
) -> None:
    assert kept(rule) == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # k3 = r - 1 - log r: 0.148721, 0.367879, 0 and 0.034025 each; k2 0.125, 0.5, 0 and 0.03125.
        (KlRule(over="token", high=0.2), [[1, 0, 1], [1, 1, 1]]),
        (KlRule(over="token", estimator="k2", high=0.03), [[0, 0, 1], [0, 0, 0]]),
        # Sums 0.516600 and 0.102076.
        (KlRule(over="sum", high=0.5165), [[0, 0, 0], [1, 1, 1]]),
        (KlRule(over="sum", high=0.5167), [[1, 1, 1], [1, 1, 1]]),
        # Means of k3 0.172200, of k2 0.208333, of k1 = -log r 0.166667 and -0.25.
        (KlRule(high=0.1721), [[0, 0, 0], [1, 1, 1]]),
        (KlRule(estimator="k2", high=0.2084), [[1, 1, 1], [1, 1, 1]]),
        (KlRule(estimator="k1", high=0.166), [[0, 0, 0], [1, 1, 1]]),
        (KlRule(over="max", high=0.3678), [[0, 0, 0], [1, 1, 1]]),
        (KlRule(over="max", estimator="k2", high=0.5), [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_kl_bounds_tokens_sums_means_and_maxima(rule: KlRule, expected: list[list[int]]) -> None:
    assert kept(rule) == expected


def test_a_token_must_pass_all_rules_and_each_reports_its_own_fraction() -> None:
    rules = (RatioRule(high=1.6), KlRule(over="max", estimator="k2", high=0.03))
    samples, log_ratio = samples_of(*LOG_RATIOS)
    metrics = apply_rejection_rules(rules, log_ratio=log_ratio, samples=samples).metrics
    assert kept(*rules) == [[0, 0, 0], [0, 0, 0]]
    assert metrics == pytest.approx(
        {
            "correction/masked_fraction/ratio_token": 1 / 6,
            "correction/masked_fraction/k2_max": 1.0,
        }
    )


def test_without_rules_all_trained_tokens_are_kept() -> None:
    assert kept() == [[1, 1, 1], [1, 1, 1]]


ALL_RULES: tuple[RejectionRule, ...] = (
    *(RatioRule(over=over, low=0.7, high=1.3) for over in ("token", "sum", "mean", "max")),
    *(
        KlRule(over=over, estimator=estimator, high=0.05)
        for over in ("token", "sum", "mean", "max")
        for estimator in ("k1", "k2", "k3")
    ),
)


# Each rule sees few kinds of completions: with trained tokens and without, passing and not.
@settings(max_examples=25)
@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
@given(
    st.lists(
        st.lists(st.floats(-1.0, 1.0) | st.just(NAN), max_size=6).map(lambda tail: [NAN, *tail]),
        min_size=1,
        max_size=4,
    )
)
def test_rules_depend_on_neither_the_other_samples_nor_their_order(
    rule: RejectionRule, columns: list[list[float]]
) -> None:
    samples, log_ratio = samples_of(*columns)
    together = apply_rejection_rules([rule], log_ratio=log_ratio, samples=samples).is_kept
    single = [
        apply_rejection_rules([rule], log_ratio=ratio, samples=sample).is_kept
        for sample, ratio in (samples_of(column) for column in columns)
    ]
    assert together.tolist() == torch.cat(single).tolist()


@pytest.mark.parametrize(
    "bounds",
    [{}, {"low": 0.0}, {"low": 2.0, "high": 1.0}, {"high": -1.0}, {"high": NAN}],
)
def test_ratio_rule_without_usable_bounds_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a rule by ratio has low"):
        RatioRule(**bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("high", [0.0, -1.0, NAN])
def test_kl_rule_without_a_usable_bound_is_refused(high: float) -> None:
    with pytest.raises(ConfigError, match="a rule by kl has high"):
        KlRule(high=high)
