"""The optimal token baseline, position by position."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.algorithms.advantages.estimators.optimal_token_baseline import (
    compute_optimal_token_baseline_advantages,
    estimate_token_energies,
)


def samples_of(*masks: list[bool], group_ids: list[int]) -> SequenceBatch:
    return from_sequences(
        [torch.arange(len(mask)) for mask in masks],
        loss_masks=[torch.tensor(mask) for mask in masks],
        group_ids=group_ids,
    )


def test_baseline_is_the_energy_weighted_return_at_each_position() -> None:
    # Rewards 1 and 0 at the end; energies (0.5, 0.5) and (1, -): W = 0.5, 1 and 1.
    # t = 1: (1 * 0.5 + 0 * 1) / 1.5 = 1/3; t = 2: only the first, so the baseline is 0.
    samples = samples_of([False, True, False, True], [False, True], group_ids=[3, 3])
    advantages = compute_optimal_token_baseline_advantages(
        torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        energies=torch.tensor([math.nan, 0.5, math.nan, 0.5, math.nan, 1.0]),
        samples=samples,
    )
    assert advantages.tolist() == pytest.approx([0.0, 2 / 3, 0.0, 1.0, 0.0, -1 / 3])


def test_equal_energies_give_the_mean_of_the_group() -> None:
    samples = samples_of(*[[False, True, True]] * 3, group_ids=[0, 0, 0])
    rewards = torch.zeros(9)
    rewards[[2, 5, 8]] = torch.tensor([3.0, 0.0, 0.0])
    advantages = compute_optimal_token_baseline_advantages(
        rewards, energies=torch.full((9,), 0.7), samples=samples
    )
    assert advantages[samples.loss_mask].tolist() == pytest.approx([2.0, 2.0] + [-1.0] * 4)


def test_group_of_one_and_certain_tokens_have_finite_advantages() -> None:
    samples = samples_of([False, True], [False, True], [False, True], group_ids=[0, 1, 1])
    advantages = compute_optimal_token_baseline_advantages(
        torch.tensor([0.0, 1.0] * 3), energies=torch.zeros(6), samples=samples
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_estimated_energy_has_the_expectation_of_the_exact_one() -> None:
    # p = (0.5, 0.3, 0.2), sum of squares 0.38: E[1 - 2p + 0.38] = 1.38 - 2 * 0.38 = 0.62, and
    # E[1 - p] = 1 - 0.38.
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert float((p * (1 - 2 * p + 0.38)).sum()) == pytest.approx(0.62)
    assert float((p * estimate_token_energies(p.log())).sum()) == pytest.approx(0.62)


ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.floats(0.125, 1.0), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@given(ROLLOUTS, st.integers(0, 1000))
def test_advantages_equal_a_loop_over_positions_in_any_order(
    rollouts: list[tuple[int, list[float]]], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = [torch.randn(len(energies), generator=draw).tolist() for _, energies in rollouts]
    expected = [
        [loop_advantage(rollouts, rewards, i, t) for t in range(len(energies))]
        for i, (_, energies) in enumerate(rollouts)
    ]
    for order in (list(range(len(rollouts))), torch.randperm(len(rollouts), generator=draw)):
        samples = samples_of(
            *([False] + [True] * len(energies) for _, energies in rollouts),
            group_ids=[group for group, _ in rollouts],
        ).with_columns(
            {
                "rewards": torch.tensor([x for row in rewards for x in (math.nan, *row)]),
                "energies": torch.tensor([x for _, row in rollouts for x in (math.nan, *row)]),
            }
        )
        samples = samples.select(order)
        advantages = compute_optimal_token_baseline_advantages(
            samples.columns["rewards"], energies=samples.columns["energies"], samples=samples
        )
        flat = [x for i in order for x in expected[int(i)]]
        assert advantages[samples.loss_mask].tolist() == pytest.approx(flat, abs=1e-6)


def loop_advantage(
    rollouts: list[tuple[int, list[float]]], rewards: list[list[float]], i: int, t: int
) -> float:
    group = rollouts[i][0]
    members = [j for j, (other, _) in enumerate(rollouts) if other == group]
    if len(members) == 1:
        return 0.0
    present = [j for j in members if t < len(rollouts[j][1])]
    own = sum(rewards[i][t:])
    if len(present) == 1:
        return own
    weights = {j: sum(rollouts[j][1][: t + 1]) for j in present}
    baseline = sum(weights[j] * sum(rewards[j][t:]) for j in present) / sum(weights.values())
    return own - baseline
