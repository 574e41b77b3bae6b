"""Rollout correction: weights, masks, rejection, and what is always reported."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.rollout_correction import (
    Correction,
    compute_effective_sample_fraction,
    compute_mismatch_metrics,
    compute_rollout_correction,
)
from temper_trainer.config.algorithm import RolloutCorrectionConfig

SAMPLES = from_sequences([torch.arange(4)], loss_masks=[torch.arange(4) > 0])
ROLLOUT = torch.tensor([torch.nan, -1.0, -1.0, -1.0])
OLD = torch.tensor([torch.nan, -0.5, -2.0, -1.0])
"""Ratios e^0.5 = 1.648721, e^-1 = 0.367879, 1."""


def corrected(**settings: object) -> Correction:
    config = RolloutCorrectionConfig(**settings)  # type: ignore[arg-type]
    return compute_rollout_correction(
        config, samples=SAMPLES, old_logprobs=OLD, rollout_logprobs=ROLLOUT
    )


def test_weights_are_truncated_above() -> None:
    correction = corrected(truncate_at=1.2)
    assert correction.weights.tolist() == pytest.approx([0.0, 1.2, 0.367879, 1.0], abs=1e-6)
    assert correction.metrics["correction/truncated_fraction"] == pytest.approx(1 / 3)


def test_tokens_outside_the_bounds_are_masked_and_the_rest_normalized() -> None:
    # 1.2 + 1 = 2.2 over 3 tokens: times 3 / 2.2.
    correction = corrected(truncate_at=1.2, mask_low=0.5, self_normalize=True)
    assert correction.weights.tolist() == pytest.approx([0.0, 1.636364, 0.0, 1.363636], abs=1e-6)
    assert correction.metrics["correction/masked_fraction"] == pytest.approx(1 / 3)
    assert correction.metrics["correction/weight_mean"] == pytest.approx(1.0)


def test_pure_mask_rejects_tokens_and_keeps_the_weights_of_the_others() -> None:
    corrected_by_mask = corrected(mask_only=True, mask_low=0.5, mask_high=1.6)
    assert corrected_by_mask.weights.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert corrected_by_mask.metrics["correction/truncated_fraction"] == 0.0
    # The ratio of the completion is 0.606531, inside the bounds.
    assert corrected(level="sequence", mask_only=True, mask_low=0.5).weights.tolist() == [
        0,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"mask_low": 0.5, "self_normalize": True}, {"mask_low": 0.5, "truncate_at": 3.0}],
)
def test_pure_mask_without_bounds_or_with_weights_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="mask_only"):
        RolloutCorrectionConfig(mask_only=True, **settings)  # type: ignore[arg-type]


def test_sequence_weight_is_the_product_of_its_ratios() -> None:
    # e^(0.5 - 1 + 0) = 0.606531.
    assert corrected(level="sequence").weights.tolist() == pytest.approx(
        [0.0, 0.606531, 0.606531, 0.606531], abs=1e-6
    )


@pytest.mark.parametrize(("bound", "is_rejected"), [(0.172, True), (0.173, False)])
def test_completion_with_too_large_a_kl_is_rejected(bound: float, is_rejected: bool) -> None:
    # k3 with d = 0.5, -1, 0: 0.148721, 0.367879, 0; mean 0.172200.
    correction = corrected(level="none", reject_kl=bound)
    assert correction.weights[1:].tolist() == ([0.0] * 3 if is_rejected else [1.0] * 3)
    assert correction.metrics["correction/rejected_fraction"] == float(is_rejected)


def test_equal_logprobs_give_weights_of_one() -> None:
    correction = compute_rollout_correction(
        RolloutCorrectionConfig(), samples=SAMPLES, old_logprobs=OLD, rollout_logprobs=OLD
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
        ({"mask_low": 2.0, "mask_high": 1.0}, "the first must be smaller than the second"),
        ({"level": "none"}, "so there is no correction"),
        ({"level": "none", "mask_low": 0.5, "reject_kl": 1.0}, "have no effect at level none"),
        ({"proximal": "rollout"}, "would correct twice"),
        ({"reject_kl_estimator": "k1"}, "has no effect without"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RolloutCorrectionConfig(**settings)  # type: ignore[arg-type]
