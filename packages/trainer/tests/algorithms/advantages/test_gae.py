"""Generalized advantage estimation over trained tokens, which need not be contiguous."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.algorithms.advantages.advantage_statistics import (
    assign_to_last_token,
    compute_discounted_sums,
)
from temper_trainer.algorithms.advantages.estimators.token_estimators import (
    compute_gae,
    compute_length_adaptive_lambdas,
)

MASKS = st.lists(
    st.lists(st.booleans(), max_size=8).map(lambda tail: [False, *tail]), min_size=1, max_size=4
)


def samples_of(*masks: list[bool]) -> SequenceBatch:
    return from_sequences(
        [torch.arange(len(m)) for m in masks], loss_masks=[torch.tensor(m) for m in masks]
    )


def test_gae_of_three_tokens_computed_by_hand() -> None:
    # delta_3 = 1 - 0.7 = 0.3; delta_2 = 0.9 * 0.7 - 0.6 = 0.03; delta_1 = 0.9 * 0.6 - 0.5 = 0.04;
    # decay 0.9 * 0.8 = 0.72. A_3 = 0.3; A_2 = 0.03 + 0.72 * 0.3 = 0.246; A_1 = 0.04 + 0.72 * 0.246
    # = 0.21712; returns are A + V.
    samples = samples_of([False, True, True, True])
    rewards = assign_to_last_token(torch.tensor([1.0]), samples=samples)
    values = torch.tensor([9.0, 0.5, 0.6, 0.7])
    advantages, returns = compute_gae(
        rewards, values=values, samples=samples, gamma=0.9, gae_lambda=0.8
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.21712, 0.246, 0.3], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.0, 0.71712, 0.846, 1.0], abs=1e-6)


def test_returns_may_have_another_lambda_than_advantages() -> None:
    # With lambda 1 for the values: A_3 = 0.3; A_2 = 0.03 + 0.9 * 0.3 = 0.3; A_1 = 0.04 + 0.9 * 0.3
    # = 0.31; the returns are A + V, the discounted rewards 0.81, 0.9, 1. The advantages are those
    # of the test above.
    samples = samples_of([False, True, True, True])
    rewards = assign_to_last_token(torch.tensor([1.0]), samples=samples)
    values = torch.tensor([9.0, 0.5, 0.6, 0.7])
    advantages, returns = compute_gae(
        rewards, values=values, samples=samples, gamma=0.9, gae_lambda=0.8, value_lambda=1.0
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.21712, 0.246, 0.3], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.0, 0.81, 0.9, 1.0], abs=1e-6)


def test_lambda_grows_with_the_length_of_a_sample() -> None:
    # 1 - 1 / (0.5 * 4) = 0.5; 1 - 1 / (0.5 * 10) = 0.8; 0.5 * 1 is below 1, and no token is.
    samples = samples_of(
        [False] + [True] * 4, [False] + [True] * 5 + [False] + [True] * 5, [False, True], [False]
    )
    lambdas = compute_length_adaptive_lambdas(samples, length_factor=0.5)
    assert lambdas.tolist() == pytest.approx([0.5, 0.8, 0.0, 0.0])
    # Each sample is discounted by its own lambda: rewards 1 at the end, without values.
    rewards = assign_to_last_token(torch.ones(4), samples=samples)
    advantages, _ = compute_gae(
        rewards,
        values=torch.zeros(samples.num_tokens),
        samples=samples,
        gamma=1.0,
        gae_lambda=lambdas,
    )
    assert advantages[1:5].tolist() == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert float(advantages[6]) == pytest.approx(0.8**9)


def test_untrained_tokens_between_turns_change_nothing_even_if_their_values_are_nan() -> None:
    samples = samples_of([False, True, False, False, True, True, False])
    rewards = assign_to_last_token(torch.tensor([1.0]), samples=samples)
    values = torch.tensor([math.nan, 0.5, math.nan, math.nan, 0.6, 0.7, math.nan])
    advantages, returns = compute_gae(
        rewards, values=values, samples=samples, gamma=0.9, gae_lambda=0.8
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.21712, 0.0, 0.0, 0.246, 0.3, 0.0], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.0, 0.71712, 0.0, 0.0, 0.846, 1.0, 0.0], abs=1e-6)


def test_with_lambda_and_gamma_one_the_advantage_is_reward_minus_value() -> None:
    samples = samples_of([False, True, True], [False, True])
    rewards = assign_to_last_token(torch.tensor([2.0, -1.0]), samples=samples)
    values = torch.tensor([0.0, 0.5, 1.5, 0.0, 3.0])
    advantages, returns = compute_gae(
        rewards, values=values, samples=samples, gamma=1.0, gae_lambda=1.0
    )
    assert advantages.tolist() == pytest.approx([0.0, 1.5, 0.5, 0.0, -4.0])
    assert returns.tolist() == pytest.approx([0.0, 2.0, 2.0, 0.0, -1.0])


def test_reward_of_a_sample_without_trained_tokens_is_dropped() -> None:
    samples = samples_of([False, False], [False, True, False])
    assert assign_to_last_token(torch.tensor([5.0, 3.0]), samples=samples).tolist() == [
        0.0,
        0.0,
        0.0,
        3.0,
        0.0,
    ]


@given(MASKS, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_gae_equals_a_loop_over_tokens(
    masks: list[list[bool]], gamma: float, gae_lambda: float, seed: int
) -> None:
    samples = samples_of(*masks)
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, samples.num_tokens, generator=draw, dtype=torch.float64)
    advantages, _ = compute_gae(
        rewards, values=values, samples=samples, gamma=gamma, gae_lambda=gae_lambda
    )
    expected = loop_over_tokens(samples, rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)


def test_long_samples_are_summed_over_their_full_length() -> None:
    # 1 + 0.99 + ... + 0.99^999 = (1 - 0.99^1000) / 0.01.
    samples = samples_of([False] + [True] * 1000)
    sums = compute_discounted_sums(torch.ones(1001), samples=samples, decay=0.99)
    assert float(sums[1]) == pytest.approx((1 - 0.99**1000) / 0.01)


def loop_over_tokens(
    samples: SequenceBatch, rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float
) -> list[float]:
    advantages = [0.0] * samples.num_tokens
    for b in range(samples.num_sequences):
        next_value = next_advantage = 0.0
        for t in reversed(
            range(int(samples.sequence_starts[b]), int(samples.sequence_starts[b + 1]))
        ):
            if samples.loss_mask[t]:
                delta = float(rewards[t]) + gamma * next_value - float(values[t])
                next_advantage = advantages[t] = delta + gamma * gae_lambda * next_advantage
                next_value = float(values[t])
    return advantages
