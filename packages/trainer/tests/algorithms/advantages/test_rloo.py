"""Leave-one-out advantages, by hand and against a slow loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.algorithms.advantages.estimators.group_estimators import compute_rloo_advantages


def test_baseline_is_the_mean_of_the_other_completions() -> None:
    # 3 - (1 + 2) / 2 = 1.5;  1 - (3 + 2) / 2 = -1.5;  2 - (3 + 1) / 2 = 0.
    advantages = compute_rloo_advantages(
        torch.tensor([3.0, 1.0, 2.0]), group_ids=torch.tensor([4, 4, 4])
    )
    assert advantages.tolist() == pytest.approx([1.5, -1.5, 0.0])


def test_rloo_of_a_group_of_one_is_zero() -> None:
    assert compute_rloo_advantages(torch.tensor([5.0]), group_ids=torch.tensor([0])).tolist() == [
        0.0
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=12))
def test_rloo_equals_a_loop_over_the_others(pairs: list[tuple[int, float]]) -> None:
    expected = []
    for i, (group, reward) in enumerate(pairs):
        others = [r for j, (g, r) in enumerate(pairs) if g == group and j != i]
        expected.append(reward - sum(others) / len(others) if others else 0.0)
    rewards = torch.tensor([r for _, r in pairs], dtype=torch.float64)
    advantages = compute_rloo_advantages(rewards, group_ids=torch.tensor([g for g, _ in pairs]))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
