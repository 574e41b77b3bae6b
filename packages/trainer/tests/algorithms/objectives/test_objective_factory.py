"""Test the objectives that a configuration describes."""

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.advantages.estimators.token_estimators import Gae
from temper_trainer.algorithms.objectives.objective_factory import (
    aggregate_by_prompt,
    build_policy_objective,
    build_value_objective,
    needs_old_logprobs,
)
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.config.algorithm import AggregationName, AlgorithmConfig, BatchingConfig


def three_sequences() -> SequenceBatch:
    """Build sequences of 1, 2 and 3 trained tokens with losses 6 | 3, 3 | 2, 2, 2."""
    losses = [
        torch.tensor([0.0, 6.0]),
        torch.tensor([0.0, 3.0, 3.0]),
        torch.tensor([0.0, 2.0, 2.0, 2.0]),
    ]
    return from_sequences(
        [torch.arange(len(column)) for column in losses],
        loss_masks=[torch.arange(len(column)) >= 1 for column in losses],
        group_ids=[0, 0, 1],
        columns={
            "advantages": [-column for column in losses],
            "old_logprobs": [torch.full_like(column, -1.0) for column in losses],
        },
    )


@pytest.mark.parametrize(
    ("mode", "horizon", "expected"),
    [
        ("token_mean", None, (6 + 6 + 6) / 6),
        ("sequence_mean_token_mean", None, (6 + 3 + 2) / 3),
        ("sequence_mean_token_sum", None, (6 + 6 + 6) / 3),
        ("sequence_mean_token_sum_norm", 4, (6 / 4 + 6 / 4 + 6 / 4) / 3),
        ("prompt_mean", None, ((6 + 6) / 3 + 6 / 3) / 2),
        ("token_sum", None, 6 + 6 + 6),
    ],
)
def test_every_aggregation_computed_by_hand(
    mode: AggregationName, horizon: int | None, expected: float
) -> None:
    config = AlgorithmConfig(aggregation=mode, horizon=horizon)
    objective = aggregate_by_prompt(build_policy_objective(config), config=config)
    batch = three_sequences()
    batch = batch.with_columns(objective.prepare(batch, seed=0))
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: torch.full((9,), -1.0)}), batch)
    loss = reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=objective.aggregation
    )
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mini_batches", "passes", "kl_reward_coef", "expected"),
    [(1, 1, 0.0, False), (2, 1, 0.0, True), (1, 2, 0.0, True), (1, 1, 0.1, True)],
)
def test_old_logprobs_are_measured_unless_the_step_makes_one_update(
    mini_batches: int, passes: int, kl_reward_coef: float, expected: bool
) -> None:
    batching = BatchingConfig(num_mini_batches=mini_batches, num_passes=passes)
    assert needs_old_logprobs(AlgorithmConfig(kl_reward_coef=kl_reward_coef), batching) is expected


def test_every_coefficient_of_the_configuration_reaches_its_objective() -> None:
    config = AlgorithmConfig(
        advantage=Gae(value_clip=0.4),
        policy_loss=Ppo(clip_low=0.1, clip_high=0.3, dual_clip=2.0),
        entropy_coef=0.01,
        kl_loss_coef=0.02,
        kl_estimator="k2",
    )
    actor, critic = (
        build_policy_objective(config, old_is_current=True),
        build_value_objective(config),
    )
    assert actor.loss == Ppo(clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    assert (actor.entropy_coef, actor.kl_coef, actor.kl_estimator, actor.old_is_current) == (
        0.01,
        0.02,
        "k2",
        True,
    )
    assert critic.clip == 0.4
