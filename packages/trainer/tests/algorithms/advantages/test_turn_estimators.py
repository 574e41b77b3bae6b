"""Estimators with settings that the configuration gives them: turns, lambdas, energies."""

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.optimal_token_baseline import (
    OptimalTokenBaseline,
)
from temper_trainer.algorithms.advantages.estimators.pass_rate_estimators import GrpoPassk, MaxRl
from temper_trainer.algorithms.advantages.estimators.token_estimators import (
    Gae,
    ReinforcePlusPlus,
    Vapo,
)
from temper_trainer.algorithms.advantages.estimators.turn_estimators import TurnGrpo
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.config.algorithm import AlgorithmConfig

MASK = torch.tensor([False, True, True, False, True])
"""Two turns: two trained tokens, a tool's answer, one trained token."""


def two_rollouts(*earned: float) -> SequenceBatch:
    """Return two rollouts of one prompt; the environment paid ``earned`` for their first turns."""
    return from_sequences(
        [torch.arange(5)] * 2,
        loss_masks=[MASK] * 2,
        group_ids=[0, 0],
        columns={
            "turns_after": [torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])] * 2,
            "turn_rewards": [torch.tensor([0.0, 0.0, each, 0.0, 0.0]) for each in earned],
            "rollout_logprobs": [torch.full((5,), -1.0)] * 2,
        },
    )


def estimate(
    estimator: AdvantageEstimator, samples: SequenceBatch, *rewards: float, kl: float = 0.0
) -> list[float]:
    """Return the advantages at trained tokens; values are 0, and kl is subtracted per token."""
    config = AlgorithmConfig(advantage=estimator, kl_reward_coef=1.0 if kl else 0.0)
    estimated = estimate_advantages(
        config,
        samples=samples,
        rewards=torch.tensor(rewards),
        values=torch.zeros(samples.num_tokens) if config.reads("values") else None,
        kl=torch.full((samples.num_tokens,), kl) if kl else None,
    )
    return estimated.advantages[samples.loss_mask].tolist()


def test_gae_credits_the_turn_that_earned_a_reward_only_with_the_setting() -> None:
    # The first rollout has reward 3, of which its first turn earned 2.
    samples = two_rollouts(2.0, 0.0)
    assert estimate(Gae(), samples, 3.0, 1.0) == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    by_turn = estimate(Gae(turn_rewards=True), samples, 3.0, 1.0)
    assert by_turn == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    # The KL penalty of 0.5 a token stays where it is: 3 - 1.5, 3 - 1, 1 - 0.5.
    penalized = estimate(Gae(turn_rewards=True), samples, 3.0, 1.0, kl=0.5)
    assert penalized[:3] == pytest.approx([1.5, 2.0, 0.5])


def test_reinforce_plus_plus_takes_the_rewards_of_turns() -> None:
    # Returns 3, 3, 1 | 1, 1, 1: mean 5/3, variance 8/9, whitened 4/3 and -2/3 over 0.942809.
    advantages = estimate(ReinforcePlusPlus(turn_rewards=True), two_rollouts(2.0, 0.0), 3.0, 1.0)
    assert advantages == pytest.approx([2**0.5] * 2 + [-(0.5**0.5)] * 4, abs=1e-5)


def test_turn_grpo_compares_turns() -> None:
    # Returns (3, 1) and (1, 1): the second turns are equal.
    estimator = TurnGrpo(scale_by_std=False)
    advantages = estimate(estimator, two_rollouts(2.0, 0.0), 3.0, 1.0)
    assert advantages == [1.0, 1.0, 0.0, -1.0, -1.0, 0.0]


def test_vapo_decays_advantages_by_length_and_not_the_returns() -> None:
    # Three trained tokens with length_factor 2/3: lambda = 1 - 1/2.
    samples = two_rollouts(0.0, 0.0)
    advantages = estimate(Vapo(length_factor=2 / 3), samples, 1.0, 0.0)
    assert advantages[:3] == pytest.approx([0.25, 0.5, 1.0])
    returns = estimate_advantages(
        AlgorithmConfig(advantage=Vapo(length_factor=2 / 3)),
        samples=samples,
        rewards=torch.tensor([1.0, 0.0]),
        values=torch.zeros(10),
    ).returns
    assert returns is not None
    assert returns[samples.loss_mask][:3].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (MaxRl(), [1.0, -1.0]),  # (1 - 0.5) / 0.5
        (GrpoPassk(scale_by_std=False), [1.0, 0.0]),
        (OptimalTokenBaseline(), [0.5, -0.5]),  # equal energies
    ],
)
def test_group_estimators_are_selected_by_the_configuration(
    estimator: AdvantageEstimator, expected: list[float]
) -> None:
    advantages = estimate(estimator, two_rollouts(0.0, 0.0), 1.0, 0.0)
    assert advantages == pytest.approx([x for each in expected for x in [each] * 3])
