"""REINFORCE++ and its baseline, by hand."""

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.algorithms.advantages.advantage_statistics import assign_to_last_token
from temper_trainer.algorithms.advantages.estimators.group_estimators import (
    compute_reinforce_plus_plus_baseline_advantages,
)
from temper_trainer.algorithms.advantages.estimators.token_estimators import (
    compute_reinforce_plus_plus_advantages,
)


def samples_of(*masks: list[bool], group_ids: list[int]) -> SequenceBatch:
    return from_sequences(
        [torch.arange(len(m)) for m in masks],
        loss_masks=[torch.tensor(m) for m in masks],
        group_ids=group_ids,
    )


def test_reward_to_go_is_discounted_and_whitened_over_the_tokens_of_the_step() -> None:
    # To go: 0.5 * 2 = 1, 2 | 0. Mean 1, variance (0 + 1 + 1) / 3, deviation 0.816497: 0, 1.224745,
    # -1.224745.
    samples = samples_of([False, True, True], [False, True], group_ids=[0, 1])
    rewards = assign_to_last_token(torch.tensor([2.0, 0.0]), samples=samples)
    advantages = compute_reinforce_plus_plus_advantages(rewards, samples=samples, gamma=0.5)
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 1.224745, 0.0, -1.224745], abs=1e-6)


def test_reward_after_a_tool_turn_reaches_the_tokens_before_it() -> None:
    # To go: 1 and 1 around the span, 0 in the other sample. Mean 2/3, deviation sqrt(2)/3:
    # 0.707107, 0.707107, -1.414214.
    samples = samples_of([False, True, False, False, True], [False, True], group_ids=[0, 1])
    rewards = assign_to_last_token(torch.tensor([1.0, 0.0]), samples=samples)
    advantages = compute_reinforce_plus_plus_advantages(rewards, samples=samples, gamma=1.0)
    assert advantages.tolist() == pytest.approx(
        [0.0, 0.707107, 0.0, 0.0, 0.707107, 0.0, -1.414214], abs=1e-6
    )


def test_baseline_variant_subtracts_the_group_mean_and_whitens_over_tokens() -> None:
    # Above the mean: 0.5 once, -0.5 three times. Mean -0.25; distances 0.75 and -0.25; variance
    # (0.5625 + 3 * 0.0625) / 4 = 0.1875, deviation 0.433013: 1.732051 and -0.577350.
    samples = samples_of([False, True], [False, True, True, True], group_ids=[3, 3])
    advantages = compute_reinforce_plus_plus_baseline_advantages(
        torch.tensor([1.0, 0.0]), samples=samples
    )
    assert advantages.tolist() == pytest.approx(
        [0.0, 1.732051, 0.0, -0.57735, -0.57735, -0.57735], abs=1e-6
    )
