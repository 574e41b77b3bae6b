"""Rollout correction: weights, masks, rejection, and what is always reported."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.importance_weights import (
    Correction,
    compute_effective_sample_fraction,
    compute_mismatch_metrics,
    compute_rollout_correction,
)
from temper_trainer.config.rollout_correction import (
    REJECTION_RULES,
    Mask,
    RejectionBounds,
    RolloutCorrection,
    RolloutRatio,
    TokenWeights,
)
from temper_trainer.settings.variants import list_variants

SAMPLES = from_sequences([torch.arange(4)], loss_masks=[torch.arange(4) > 0])
ROLLOUT = torch.tensor([torch.nan, -1.0, -1.0, -1.0])
OLD = torch.tensor([torch.nan, -0.5, -2.0, -1.0])
"""Ratios e^0.5 = 1.648721, e^-1 = 0.367879, 1."""


def bounds(low: float | None = None, high: float | None = None) -> RejectionBounds:
    return RejectionBounds(low=low, high=high)


def corrected(name: str = "token", **settings: object) -> Correction:
    config = list_variants(RolloutCorrection)[name](**settings)  # type: ignore[type-abstract]
    return compute_rollout_correction(
        config, samples=SAMPLES, old_logprobs=OLD, rollout_logprobs=ROLLOUT
    )


def test_weights_are_truncated_above() -> None:
    correction = corrected(truncate_at=1.2)
    assert correction.weights.tolist() == pytest.approx([0.0, 1.2, 0.367879, 1.0], abs=1e-6)
    assert correction.metrics["correction/truncated_fraction"] == pytest.approx(1 / 3)


def test_rejected_tokens_have_weight_zero_and_the_rest_is_normalized() -> None:
    # 1.2 + 1 = 2.2 over 3 tokens: times 3 / 2.2.
    reject = {"ratio_token": bounds(low=0.5)}
    correction = corrected(truncate_at=1.2, reject=reject, self_normalize=True)
    assert correction.weights.tolist() == pytest.approx([0.0, 1.636364, 0.0, 1.363636], abs=1e-6)
    assert correction.metrics["correction/masked_fraction"] == pytest.approx(1 / 3)
    assert correction.metrics["correction/masked_fraction/ratio_token"] == pytest.approx(1 / 3)
    assert correction.metrics["correction/rejected_fraction"] == 0.0
    assert correction.metrics["correction/weight_mean"] == pytest.approx(1.0)


def test_rules_without_weights_only_mask() -> None:
    masked = corrected(name="mask", reject={"ratio_token": bounds(low=0.5, high=1.6)})
    assert masked.weights.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert masked.metrics["correction/truncated_fraction"] == 0.0
    # The product of the completion's ratios is 0.606531, their geometric mean 0.846482.
    for rule, low, weight in (
        ("ratio_sum", 0.6, 1),
        ("ratio_sum", 0.61, 0),
        ("ratio_mean", 0.8, 1),
    ):
        weights = corrected(name="mask", reject={rule: bounds(low=low)}).weights
        assert weights.tolist() == [0, weight, weight, weight]


def test_weights_of_completions_go_with_rejection_of_tokens_and_several_rules() -> None:
    reject = {"ratio_token": bounds(low=0.5), "k2_max": bounds(high=0.6), "k3_mean": bounds(high=1)}
    weights = corrected(name="sequence", reject=reject).weights
    assert weights.tolist() == pytest.approx([0.0, 0.606531, 0.0, 0.606531], abs=1e-6)


def test_one_outlier_token_rejects_its_completion() -> None:
    correction = corrected(reject={"ratio_max": bounds(low=0.37)})
    assert correction.weights.tolist() == [0.0] * 4
    assert correction.metrics["correction/rejected_fraction"] == 1.0


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_every_rule_keeps_what_sampler_and_trainer_agree_on(rule: str) -> None:
    correction = compute_rollout_correction(
        Mask(reject={rule: bounds(high=1.5)}),
        samples=SAMPLES,
        old_logprobs=OLD,
        rollout_logprobs=OLD,
    )
    assert correction.weights.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert correction.metrics[f"correction/masked_fraction/{rule}"] == 0.0


def test_sequence_weight_is_the_product_of_its_ratios() -> None:
    # e^(0.5 - 1 + 0) = 0.606531.
    assert corrected(name="sequence").weights.tolist() == pytest.approx(
        [0.0, 0.606531, 0.606531, 0.606531], abs=1e-6
    )


@pytest.mark.parametrize(("bound", "is_rejected"), [(0.172, True), (0.173, False)])
def test_completion_with_too_large_a_kl_is_rejected(bound: float, is_rejected: bool) -> None:
    # k3 with d = 0.5, -1, 0: 0.148721, 0.367879, 0; mean 0.172200.
    correction = corrected(name="mask", reject={"k3_mean": bounds(high=bound)})
    assert correction.weights[1:].tolist() == ([0.0] * 3 if is_rejected else [1.0] * 3)
    assert correction.metrics["correction/rejected_fraction"] == float(is_rejected)


def test_equal_logprobs_give_weights_of_one() -> None:
    correction = compute_rollout_correction(
        TokenWeights(), samples=SAMPLES, old_logprobs=OLD, rollout_logprobs=OLD
    )
    assert correction.weights.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert correction.metrics["correction/effective_sample_fraction"] == pytest.approx(1.0)


def test_effective_sample_fraction_is_always_reported() -> None:
    # Weights 1 and 3: mean 2, mean of squares 5; 4 / 5.
    trainer_logprobs, mask = (
        torch.tensor([0.0, 0.0, torch.tensor(3.0).log()]),
        torch.tensor([False, True, True]),
    )
    metrics = compute_mismatch_metrics(
        trainer_logprobs, rollout_logprobs=torch.zeros(3), loss_mask=mask
    )
    assert compute_effective_sample_fraction(metrics) == pytest.approx(0.8)
    assert metrics["mismatch/ratio_max"].result == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"reject": {"ratio_sum": bounds(low=2.0, high=1.0)}},
            r"reject.ratio_sum.low is 2.0 and high is 1.0: the first must be smaller",
        ),
        ({"reject": {"ratio_token": bounds()}}, "reject.ratio_token has no bound"),
        ({"reject": {"k3_mean": bounds(low=1.0, high=2.0)}}, "has only an upper bound"),
        ({"reject": {"ratio_tokens": bounds(high=2.0)}}, "Did you mean 'ratio_token'"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TokenWeights(**settings)  # type: ignore[arg-type]


def test_mask_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="is mask and reject is empty, so there is no correction"):
        Mask()


def test_only_a_ratio_to_the_sampler_replaces_the_old_logprobs() -> None:
    reject = {"ratio_token": bounds(high=2.0)}
    variants = list_variants(RolloutCorrection)  # type: ignore[type-abstract]
    made = {name: cls(reject=reject) for name, cls in variants.items()}  # type: ignore[call-arg]
    assert [name for name, each in made.items() if each.replaces_old_logprobs] == ["rollout_ratio"]
    assert all(each.has_weights for each in made.values())
    assert not RolloutRatio().has_weights


def test_bound_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"high of RejectionBounds is 0\.0, but must be above 0"):
        bounds(high=0.0)
