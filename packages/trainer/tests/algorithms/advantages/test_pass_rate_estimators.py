"""MaxRL and pass@k: advantages whose objective is not the mean reward."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import from_sequences
from temper_trainer.algorithms.advantages.estimators import pass_rate_estimators
from temper_trainer.algorithms.advantages.estimators.pass_rate_estimators import (
    MaxRl,
    compute_maxrl_advantages,
    compute_passk_advantages,
)
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.config.algorithm import AlgorithmConfig

GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
    min_size=1,
    max_size=10,
)


def split(pairs: list[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([r for _, r in pairs]), torch.tensor([g for g, _ in pairs])


def test_maxrl_divides_by_the_pass_rate() -> None:
    # Pass rates 1/4, 1, 0: (1 - 0.25) / 0.25 = 3 and (0 - 0.25) / 0.25 = -1.
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    groups = torch.tensor([7, 7, 7, 7, 3, 3, 5, 5])
    advantages = compute_maxrl_advantages(rewards, group_ids=groups)
    assert advantages.tolist() == [-1.0, 3.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_maxrl_gives_no_signal_where_the_mean_is_not_positive() -> None:
    # Means 0 and -1: a division would be infinite or turn the sign of every advantage.
    rewards, groups = torch.tensor([1.0, -1.0, 0.0, -2.0]), torch.tensor([0, 0, 1, 1])
    assert compute_maxrl_advantages(rewards, group_ids=groups).tolist() == [0.0] * 4


@pytest.mark.parametrize(("lowest", "is_warned"), [(-1.0, True), (0.0, False)])
def test_maxrl_warns_once_about_negative_rewards(
    lowest: float, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    samples = from_sequences(
        [torch.tensor([5, 6])] * 2,
        loss_masks=[torch.tensor([False, True])] * 2,
        group_ids=[0, 0],
    )
    # A penalty makes the first reward negative, which is no reason to warn.
    config = AlgorithmConfig(advantage=MaxRl(), kl_reward_coef=1.0)
    kl = torch.full((4,), 0.5)
    rewards = torch.tensor([lowest, 1.0])
    pass_rate_estimators._warn_about_negative_rewards.cache_clear()
    for _ in range(2):
        estimate_advantages(config, samples=samples, rewards=rewards, kl=kl)
    assert caplog.text.count("some rewards are negative") == int(is_warned)


def test_maxrl_gradient_is_that_of_the_log_pass_rate_for_large_groups() -> None:
    # Two answers with probability p = 0.2 of the right one; d log p / d logit = 1 - p. A group of
    # exactly 1000 right and 4000 wrong answers has the mean of A * d log pi / d logit = 0.8.
    rewards = torch.tensor([1.0] * 1000 + [0.0] * 4000)
    advantages = compute_maxrl_advantages(rewards, group_ids=torch.zeros(5000))
    scores = torch.where(rewards > 0, 1 - 0.2, -0.2).double()
    assert float((advantages * scores).mean()) == pytest.approx(0.8)


def test_only_a_single_best_completion_has_a_pass_at_k_advantage() -> None:
    # Leads 1 - 0.25 = 0.75 and 0 for the tie; the group of one has none.
    rewards = torch.tensor([0.25, 1.0, 0.0, 1.0, 1.0, 3.0])
    groups = torch.tensor([4, 4, 4, 2, 2, 9])
    plain = compute_passk_advantages(rewards, group_ids=groups, scale_by_std=False)
    assert plain.tolist() == [0.0, 0.75, 0.0, 0.0, 0.0, 0.0]
    # Mean 5/12; squares 1/36, 49/144, 25/144: variance 78/288, standard deviation 0.520416.
    scaled = compute_passk_advantages(rewards, group_ids=groups, scale_by_std=True)
    assert scaled.tolist() == pytest.approx([0.0, 1.441153, 0.0, 0.0, 0.0, 0.0], abs=1e-5)


@given(GROUPS)
def test_pass_at_k_is_the_best_reward_minus_the_best_without_the_completion(
    pairs: list[tuple[int, float]],
) -> None:
    rewards, groups = split(pairs)
    advantages = compute_passk_advantages(rewards, group_ids=groups, scale_by_std=False)
    for i, (group, _) in enumerate(pairs):
        members = [r for g, r in pairs if g == group]
        others = [r for j, (g, r) in enumerate(pairs) if g == group and j != i]
        expected = max(members) - max(others) if others else 0.0
        assert float(advantages[i]) == expected


@given(GROUPS, st.integers(0, 1000))
def test_advantages_do_not_depend_on_the_order_of_completions(
    pairs: list[tuple[int, float]], seed: int
) -> None:
    rewards, groups = split(pairs)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    for estimate in (
        compute_maxrl_advantages(rewards, group_ids=groups)[order]
        - compute_maxrl_advantages(rewards[order], group_ids=groups[order]),
        compute_passk_advantages(rewards, group_ids=groups, scale_by_std=True)[order]
        - compute_passk_advantages(rewards[order], group_ids=groups[order], scale_by_std=True),
    ):
        assert float(estimate.abs().max()) < 1e-9
        assert not math.isnan(float(estimate.sum()))
