"""DPPO, token by token."""

import math

import pytest

from packages.trainer.tests.algorithms.policy_losses.surrogates_for_tests import (
    answers_of,
    batch_of,
    gradient,
    losses,
)
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.divergence_losses import Dppo


def dppo(**settings: object) -> PolicyObjective:
    return PolicyObjective(loss=Dppo(**settings))  # type: ignore[arg-type]


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_dppo_masks_a_probability_that_moved_further_than_the_bound_with_the_advantage() -> None:
    # Probabilities 0.5 -> 0.7, 0.5 -> 0.7, 0.5 -> 0.3, 0.01 -> 0.02 with A = 1, -1, -1, 1 and a
    # bound of 0.15: the first and third moved 0.2 with their advantage. The second moved against
    # it: -1.4 * -1 * log 0.7 = -0.499345. The last doubled, but by only 0.01: -2 * log 0.02 =
    # 7.824046; PPO with a clip of 0.2 would mask it.
    batch = batch_of(
        {"advantages": [1.0, -1.0, -1.0, 1.0], "old_logprobs": logs(0.5, 0.5, 0.5, 0.01)}
    )
    answers = answers_of(logs(0.7, 0.7, 0.3, 0.02))
    assert losses(dppo(), answers, batch) == pytest.approx(
        [0.0, -0.499345, 0.0, 7.824046], abs=1e-5
    )
    # -rho * A / 4 tokens.
    assert gradient(dppo(), answers, batch) == pytest.approx([0.0, 0.35, 0.0, -0.5])
    metrics = dppo()(answers, batch).metrics
    assert metrics["policy/clip_fraction_low"].result == 0.25
    assert metrics["policy/clip_fraction_high"].result == 0.25


def test_dppo_measures_the_kl_between_two_bernoulli_distributions() -> None:
    # KL(0.5, 0.7) = 0.5 * log(0.5 / 0.7) + 0.5 * log(0.5 / 0.3) = -0.168236 + 0.255413 = 0.087177.
    batch = batch_of({"advantages": [1.0], "old_logprobs": logs(0.5)})
    answers = answers_of(logs(0.7))
    kept, masked = (
        gradient(dppo(divergence="kl", clip_high=bound), answers, batch)
        for bound in (0.0872, 0.0871)
    )
    assert kept == pytest.approx([-1.4])
    assert masked == [0.0]


def test_dppo_bounds_the_importance_weight_and_keeps_the_gradient() -> None:
    # rho = 0.09 / 0.001 = 90, bounded to 20; the probability moved 0.089.
    batch = batch_of({"advantages": [1.0], "old_logprobs": logs(0.001)})
    assert gradient(dppo(), answers_of(logs(0.09)), batch) == pytest.approx([-20.0])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_is_finite_where_a_probability_is_zero_or_one(divergence: str) -> None:
    batch = batch_of({"advantages": [1.0, -1.0], "old_logprobs": [0.0, -200.0]})
    answers = answers_of([-200.0, 0.0])
    assert all(map(math.isfinite, gradient(dppo(divergence=divergence), answers, batch)))


@pytest.mark.parametrize("settings", [{"clip_low": 0.0}, {"clip_high": -1.0}, {"max_ratio": 0.5}])
def test_dppo_refuses_bounds_that_mask_everything(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} of Dppo is"):
        dppo(**settings)
