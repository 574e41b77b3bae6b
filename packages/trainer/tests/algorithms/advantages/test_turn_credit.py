"""Rewards at the turns that earned them, and advantages of turns."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.algorithms.advantages.estimators.group_estimators import compute_grpo_advantages
from temper_trainer.algorithms.advantages.estimators.token_estimators import compute_gae
from temper_trainer.algorithms.advantages.estimators.turn_estimators import (
    compute_turn_advantages,
    compute_turn_rewards,
)

TURNS_AFTER, TURN_REWARDS = "turns_after", "turn_rewards"


def rollouts_of(*rollouts: list[float], group_ids: list[int] | None = None) -> SequenceBatch:
    """Return samples whose turns are a trained token, another with the reward, and a tool result.

    The first token is the prompt; entries at untrained tokens are NaN.
    """
    masks, after, earned = [], [], []
    for rewards in rollouts:
        mask, turns, column = [False], [math.nan], [math.nan]
        for k, reward in enumerate(rewards):
            mask += [True, True, False]
            turns += [len(rewards) - 1.0 - k] * 2 + [math.nan]
            column += [0.0, reward, math.nan]
        masks.append(torch.tensor(mask))
        after.append(torch.tensor(turns))
        earned.append(torch.tensor(column))
    return from_sequences(
        [torch.arange(len(mask)) for mask in masks],
        loss_masks=masks,
        group_ids=group_ids,
        columns={TURNS_AFTER: after, TURN_REWARDS: earned},
    )


def token_rewards_of(samples: SequenceBatch, rewards: list[float]) -> torch.Tensor:
    return compute_turn_rewards(
        torch.tensor(rewards), turn_rewards=samples.columns[TURN_REWARDS], samples=samples
    )


def advantages_of(
    samples: SequenceBatch,
    rewards: list[float],
    *,
    gamma: float = 1.0,
    scale_by_std: bool = False,
) -> list[float]:
    """Return the advantage of each turn, after checking that its two tokens have the same."""
    advantages = compute_turn_advantages(
        token_rewards_of(samples, rewards),
        turns_after=samples.columns[TURNS_AFTER],
        samples=samples,
        gamma=gamma,
        scale_by_std=scale_by_std,
    )
    assert advantages[~samples.loss_mask].abs().sum() == 0
    pairs = advantages[samples.loss_mask].reshape(-1, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    return pairs[:, 0].tolist()


def test_rewards_stand_at_the_end_of_their_turns_and_the_rest_at_the_last() -> None:
    # The rollout's reward is 2 = 0.25 + 0.5 of the environment and a score of 1.25.
    samples = rollouts_of([0.25, 0.5])
    column = token_rewards_of(samples, [2.0])
    assert column[samples.loss_mask].tolist() == [0.0, 0.25, 0.0, 1.75]
    assert float(column.sum()) == 2.0


def test_gae_credits_a_turn_with_its_own_and_later_rewards() -> None:
    # Without values, gamma = lambda = 1: reward-to-go. Turn 1 gets 0.25 + 1.75, turn 2 gets 1.75.
    samples = rollouts_of([0.25, 0.5])
    advantages, _ = compute_gae(
        token_rewards_of(samples, [2.0]),
        values=torch.zeros(samples.num_tokens),
        samples=samples,
        gamma=1.0,
        gae_lambda=1.0,
    )
    assert advantages[samples.loss_mask].tolist() == [2.0, 2.0, 1.75, 1.75]


def test_turn_advantages_computed_by_hand() -> None:
    # Rewards of turns 1 and 2 are (1, 0) and (0, 2); gamma = 0.5. Returns (1, 0) and (1, 2): turn 1
    # is equal, turn 2 has mean 1 and standard deviation sqrt(2).
    samples = rollouts_of([1.0, 0.0], [0.0, 2.0], group_ids=[5, 5])
    assert advantages_of(samples, [1.0, 2.0], gamma=0.5) == [0.0, -1.0, 0.0, 1.0]
    scaled = advantages_of(samples, [1.0, 2.0], gamma=0.5, scale_by_std=True)
    assert scaled == pytest.approx([0.0, -(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)
    # gamma = 0: each turn by its own reward.
    assert advantages_of(samples, [1.0, 2.0], gamma=0.0) == [0.5, -1.0, -0.5, 1.0]


def test_turns_are_compared_by_their_number_from_the_first() -> None:
    # Returns: 1, 1 | 3. The second turn has no other rollout to be compared with.
    samples = rollouts_of([0.0, 1.0], [3.0], group_ids=[0, 0])
    assert advantages_of(samples, [1.0, 3.0]) == [-1.0, 0.0, 1.0]


@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=6), st.integers(0, 100))
def test_with_one_turn_it_is_grpo(rewards: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    group_ids = torch.randint(0, 3, (len(rewards),), generator=draw)
    samples = rollouts_of(*([0.0] for _ in rewards), group_ids=group_ids.tolist())
    expected = compute_grpo_advantages(
        torch.tensor(rewards), group_ids=group_ids, scale_by_std=True
    ).tolist()
    assert advantages_of(samples, rewards, scale_by_std=True) == pytest.approx(expected, abs=1e-5)


GROUPS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(-3, 3), min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@given(GROUPS, st.floats(0.0, 1.0))
def test_turn_advantages_equal_a_loop_over_rollouts(
    rollouts: list[tuple[int, list[int]]], gamma: float
) -> None:
    returns: dict[tuple[int, int], float] = {}
    for i, (_, rewards) in enumerate(rollouts):
        following = 0.0
        for k in reversed(range(len(rewards))):
            following = returns[i, k] = rewards[k] + gamma * following
    expected = []
    for (i, k), value in sorted(returns.items()):
        others = [
            returns[j, k]
            for j, (group, rewards) in enumerate(rollouts)
            if group == rollouts[i][0] and k < len(rewards)
        ]
        expected.append(0.0 if len(set(others)) == 1 else value - statistics.fmean(others))
    samples = rollouts_of(
        *([float(r) for r in rewards] for _, rewards in rollouts),
        group_ids=[group for group, _ in rollouts],
    )
    rewards = [float(sum(rewards)) for _, rewards in rollouts]
    assert advantages_of(samples, rewards, gamma=gamma) == pytest.approx(expected, abs=1e-9)


def test_order_of_rollouts_and_a_rollout_without_trained_tokens_change_nothing() -> None:
    samples = rollouts_of([1.0, 0.0], [0.0, 2.0], [3.0], group_ids=[1, 1, 1])
    plain = advantages_of(samples, [1.0, 2.0, 3.0])
    turned = advantages_of(samples.select([2, 0, 1]), [3.0, 1.0, 2.0])
    assert turned == pytest.approx([plain[4], *plain[:4]])
    mask = samples.loss_mask & (samples.sequence_index != 2)
    assert torch.isfinite(
        compute_turn_advantages(
            torch.zeros(samples.num_tokens),
            turns_after=samples.columns[TURNS_AFTER],
            samples=from_sequences(
                list(samples.tokens.split(samples.lengths.tolist())),
                loss_masks=list(mask.split(samples.lengths.tolist())),
                group_ids=[1, 1, 1],
            ),
            gamma=1.0,
            scale_by_std=True,
        )
    ).all()
