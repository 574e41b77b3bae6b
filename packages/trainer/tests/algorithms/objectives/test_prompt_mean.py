"""Aggregation by prompt: mean over prompts of the mean over all tokens of their completions."""

import math
from dataclasses import replace

import pytest
import torch

from packages.trainer.tests.algorithms.policy_losses.surrogates_for_tests import (
    answers_of,
    batch_of,
    gradient,
)
from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.prompt_mean import PROMPT_WEIGHTS, PromptMeanObjective
from temper_trainer.algorithms.objectives.supervised_losses import SftObjective

TOKEN_SUM = Aggregation(mode=AggregationMode.TOKEN_SUM)
OBJECTIVE = PromptMeanObjective(objective=SftObjective(aggregation=TOKEN_SUM))


def batch_of_prompts(*lengths: int, group_ids: list[int]) -> SequenceBatch:
    batch = batch_of(*({"advantages": [1.0] * length} for length in lengths))
    return replace(batch, group_ids=torch.tensor(group_ids))


def test_each_prompt_weighs_the_same_whatever_the_number_of_its_tokens() -> None:
    # Prompt 7 has 1 + 3 tokens, prompt 2 has 2, of 2 prompts: 1 / (2 * 4) and 1 / (2 * 2).
    batch = batch_of_prompts(1, 2, 3, group_ids=[7, 2, 7])
    answers = answers_of([-1.0], [-1.0] * 2, [-1.0] * 3)
    assert gradient(OBJECTIVE, answers, batch) == pytest.approx(
        [-0.125, -0.25, -0.25, -0.125, -0.125, -0.125]
    )


def test_prompt_without_trained_tokens_is_not_counted() -> None:
    batch = batch_of_prompts(1, 2, group_ids=[0, 1])
    batch = replace(batch, loss_mask=batch.loss_mask & (batch.sequence_index == 1))
    weights = OBJECTIVE.prepare(batch, seed=0)[PROMPT_WEIGHTS]
    assert weights.tolist() == [0.0, 0.0, 0.0, 0.5, 0.5]


def test_mini_batch_without_trained_tokens_has_the_loss_zero() -> None:
    batch = batch_of_prompts(2, group_ids=[0])
    batch = replace(batch, loss_mask=torch.zeros(3, dtype=torch.bool))
    batch = batch.with_columns(OBJECTIVE.prepare(batch, seed=0))
    outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.full((3,), math.nan)})
    loss = reduce_loss(
        OBJECTIVE(outputs, batch),
        batch,
        denominators=count_denominators(batch),
        aggregation=OBJECTIVE.aggregation,
    )
    assert float(loss) == 0.0


def test_an_objective_that_already_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the aggregation is token_mean and token_sum"):
        PromptMeanObjective(objective=SftObjective())
