"""Advantages that differ from GRPO's in their baseline."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import BatchError
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.group_estimators import (
    Gdpo,
    ReMax,
    compute_gdpo_advantages,
    compute_gpg_advantages,
    compute_opo_advantages,
    compute_remax_advantages,
)
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.settings.variants import list_variants

TWO = from_sequences(
    [torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3])],
    loss_masks=[torch.arange(2) > 0, torch.arange(4) > 0],
    group_ids=[7, 7],
)


def test_remax_subtracts_the_reward_of_the_greedy_completion() -> None:
    rewards, baselines = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    assert compute_remax_advantages(rewards, baselines=baselines).tolist() == [1.0, -1.0, 0.0]


def test_opo_weights_the_baseline_by_length() -> None:
    # (1 * 1 + 3 * 0) / 4 = 0.25. The second group is flat.
    advantages = compute_opo_advantages(
        torch.tensor([1.0, 0.0, 0.3, 0.3]),
        lengths=torch.tensor([1, 3, 2, 9]),
        group_ids=torch.tensor([0, 0, 5, 5]),
    )
    assert advantages.tolist() == [0.75, -0.25, 0.0, 0.0]


def test_gpg_is_scaled_by_the_fraction_of_groups_with_a_signal() -> None:
    # B = 4, M = 2: twice (r - mean).
    advantages = compute_gpg_advantages(
        torch.tensor([1.0, 0.0, 1.0, 1.0]), group_ids=torch.tensor([0, 0, 1, 1])
    )
    assert advantages.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_gpg_of_zero_std_groups_is_zero() -> None:
    assert (
        compute_gpg_advantages(torch.ones(4), group_ids=torch.tensor([0, 0, 1, 1])).tolist()
        == [0.0] * 4
    )


def test_gdpo_normalizes_each_reward_before_adding_them() -> None:
    # Each reward alone gives +-1/sqrt(2); weights 1 and 2: -0.7071 and +0.7071. Over 1 and 3
    # tokens: mean 0.35355, deviation 0.61237: (-0.70711 - 0.35355) / 0.61237 = -1.73205, (0.70711 -
    # 0.35355) / 0.61237 = 0.57735.
    advantages = compute_gdpo_advantages(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        weights=(1.0, 2.0),
        penalty=torch.zeros(2),
        samples=TWO,
    )
    assert advantages[TWO.loss_mask].tolist() == pytest.approx(
        [-1.73205, 0.57735, 0.57735, 0.57735], abs=1e-5
    )


@pytest.mark.parametrize(("name", "expected"), [("opo", [0.75, -0.25]), ("gpg", [0.5, -0.5])])
def test_estimators_are_found_by_name(name: str, expected: list[float]) -> None:
    config = AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name]())
    advantages = estimate_advantages(
        config, samples=TWO, rewards=torch.tensor([1.0, 0.0])
    ).advantages
    assert advantages[TWO.loss_mask].tolist() == [expected[0]] + [expected[1]] * 3


def test_remax_needs_baselines_and_gdpo_needs_components() -> None:
    with pytest.raises(BatchError, match="baselines are missing"):
        estimate_advantages(
            AlgorithmConfig(advantage=ReMax()), samples=TWO, rewards=torch.tensor([1.0, 0.0])
        )
    with pytest.raises(BatchError, match=r"baselines are given .* are for remax alone"):
        estimate_advantages(
            AlgorithmConfig(),
            samples=TWO,
            rewards=torch.tensor([1.0, 0.0]),
            baselines=torch.zeros(2),
        )
    with pytest.raises(BatchError, match=r"gdpo needs .* set reward\.components"):
        estimate_advantages(
            AlgorithmConfig(advantage=Gdpo()), samples=TWO, rewards=torch.tensor([1.0, 0.0])
        )
