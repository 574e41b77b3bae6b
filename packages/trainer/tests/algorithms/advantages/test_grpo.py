"""Group-relative advantages, by hand and against a slow loop."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.algorithms.advantages.advantage_statistics import compute_group_statistics
from temper_trainer.algorithms.advantages.estimators.group_estimators import compute_grpo_advantages

REWARDED_GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=12
)


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 0.5, std = sqrt(4 * 0.25 / 3) = 0.57735, so 0.5 / 0.577351 = 0.866024.
    advantages = compute_grpo_advantages(
        torch.tensor([1.0, 0.0, 0.0, 1.0]), group_ids=torch.tensor([7, 7, 7, 7]), scale_by_std=True
    )
    assert advantages.tolist() == pytest.approx(
        [0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6
    )


def test_dr_grpo_does_not_divide_by_the_standard_deviation() -> None:
    # Means 0.25 and 3, groups interleaved.
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 0.0])
    advantages = compute_grpo_advantages(
        rewards, group_ids=torch.tensor([5, 2, 5, 2, 5, 5]), scale_by_std=False
    )
    assert advantages.tolist() == pytest.approx([0.75, -1.0, -0.25, 1.0, -0.25, -0.25])


def test_equal_rewards_whose_mean_rounds_give_exactly_zero() -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(rewards.sum()) / 3 != 0.1  # 0.30000000000000004 / 3
    advantages = compute_grpo_advantages(
        rewards, group_ids=torch.tensor([0, 0, 0]), scale_by_std=True
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_group_of_one_has_zero_advantage() -> None:
    advantages = compute_grpo_advantages(
        torch.tensor([1.0, 0.0, 2.0]), group_ids=torch.tensor([0, 1, 1]), scale_by_std=False
    )
    assert advantages.tolist() == [0.0, -1.0, 1.0]


def test_zero_std_groups_and_groups_of_one_are_counted() -> None:
    # Groups: 0 is one sample, 1 is flat with two, 2 differs; so 2 of 3 are flat and 1 of 3 single.
    statistics = compute_group_statistics(
        torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), group_ids=torch.tensor([0, 1, 2, 2, 1])
    )
    assert (statistics.zero_std_fraction, statistics.single_fraction) == (
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    )


@given(REWARDED_GROUPS)
def test_grpo_equals_a_loop_over_groups(pairs: list[tuple[int, float]]) -> None:
    expected = []
    for group, reward in pairs:
        peers = [r for g, r in pairs if g == group]
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        expected.append((reward - statistics.fmean(peers)) / (std + 1e-6))
    advantages = compute_grpo_advantages(
        torch.tensor([r for _, r in pairs], dtype=torch.float64),
        group_ids=torch.tensor([g for g, _ in pairs]),
        scale_by_std=True,
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
