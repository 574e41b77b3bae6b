"""PF-PPO's filter: what may be drawn, and how often."""

import pytest
import torch
from torch import Tensor

from temper_trainer.algorithms.resampling import (
    MaxMin,
    MaxRandom,
    Power,
    Reweighting,
    resample_by_reward,
)

NUM_DRAWS = 4000


def measure_frequencies(rewards: list[float], groups: list[int], config: Reweighting) -> Tensor:
    """Return the fraction of draws that chose each completion, over many seeds."""
    drawn = [
        resample_by_reward(
            torch.tensor(rewards), group_ids=torch.tensor(groups), config=config, seed=seed
        )
        for seed in range(NUM_DRAWS // len(rewards))
    ]
    assert all(len(indices) == len(rewards) for indices in drawn)
    return torch.bincount(torch.cat(drawn), minlength=len(rewards)) / sum(map(len, drawn))


def test_power_draws_in_proportion_to_the_reward() -> None:
    # |1|^2, |-2|^2, 0, |1|^2 of 6.
    frequencies = measure_frequencies([1.0, -2.0, 0.0, 1.0], [0, 0, 1, 1], Power())
    assert frequencies.tolist() == pytest.approx([1 / 6, 4 / 6, 0.0, 1 / 6], abs=0.03)
    assert frequencies[2] == 0


def test_power_zero_draws_uniformly() -> None:
    assert measure_frequencies(
        [1.0, 5.0, 0.5, 3.0], [0, 0, 1, 1], Power(exponent=0.0)
    ).tolist() == pytest.approx([0.25] * 4, abs=0.03)


def test_max_min_draws_only_the_best_and_the_worst_of_each_group() -> None:
    # Group 0 (places 0, 2, 4): best is 0, worst is 4; group 1: places 1 and 5 are best together, 3
    # is worst.
    frequencies = measure_frequencies([3.0, 2.0, 1.0, 0.0, -1.0, 2.0], [0, 1, 0, 1, 0, 1], MaxMin())
    assert frequencies.tolist() == pytest.approx([1 / 4, 1 / 8, 0.0, 1 / 4, 1 / 4, 1 / 8], abs=0.03)
    assert frequencies[2] == 0


def test_max_random_draws_the_best_or_any_of_each_group() -> None:
    # Half on the best, half on any of the four.
    frequencies = measure_frequencies([0.0, 1.0, 0.0, 0.0], [7, 7, 7, 7], MaxRandom())
    assert frequencies.tolist() == pytest.approx([1 / 8, 5 / 8, 1 / 8, 1 / 8], abs=0.03)


@pytest.mark.parametrize("config", [MaxMin(), MaxRandom()])
def test_resampling_keeps_the_size_of_groups(config: Reweighting) -> None:
    groups = torch.tensor([0, 1, 1, 0, 2, 1])
    indices = resample_by_reward(
        torch.tensor([1.0, 0.0, 2.0, 0.0, 5.0, 1.0]), group_ids=groups, config=config, seed=3
    )
    assert groups[indices].bincount().tolist() == [2, 3, 1]


def test_zero_rewards_keep_all_completions() -> None:
    assert resample_by_reward(
        torch.zeros(3), group_ids=torch.zeros(3, dtype=torch.long), config=Power(), seed=0
    ).tolist() == [0, 1, 2]


def test_resampling_depends_only_on_the_seed() -> None:
    rewards, groups = (
        torch.rand(32, generator=torch.Generator().manual_seed(0)),
        torch.arange(32) // 4,
    )
    first, again, other = (
        resample_by_reward(rewards, group_ids=groups, config=Power(), seed=seed).tolist()
        for seed in (5, 5, 6)
    )
    assert first == again != other
