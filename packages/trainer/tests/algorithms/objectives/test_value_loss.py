"""The value model's objective."""

import math

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.metrics import merge_metrics
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.value_loss import (
    ValueObjective,
    compute_explained_variance,
)


def batch_of(returns: list[float], values: list[float] | None = None) -> SequenceBatch:
    """Build one sequence whose first token is a prompt token with NaN columns."""
    columns = {"returns": returns} if values is None else {"returns": returns, "values": values}
    length = len(returns) + 1
    padded = {name: [torch.tensor([math.nan, *column])] for name, column in columns.items()}
    return from_sequences(
        [torch.arange(length)], loss_masks=[torch.arange(length) >= 1], columns=padded
    )


def answers_of(values: list[float]) -> HeadOutputs:
    return HeadOutputs(columns={HeadOutput.VALUE: torch.tensor([5.0, *values], requires_grad=True)})


def test_loss_is_half_the_squared_distance_to_the_return() -> None:
    terms = ValueObjective()(answers_of([1.0, -1.0]), batch_of([0.0, 2.0]))
    assert terms.loss[1:].tolist() == pytest.approx([0.5, 4.5])


def test_clipped_value_loss_is_the_larger_of_both() -> None:
    # Old 0, range 0.2. V = 1, R = 1: (0.2 - 1)^2 / 2 = 0.32 against 0. V = 1, R = 0: 0.02 against
    # 0.5. V = 0.1: inside, 0.005.
    terms = ValueObjective(clip=0.2)(
        answers_of([1.0, 1.0, 0.1]), batch_of([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    )
    assert terms.loss[1:].tolist() == pytest.approx([0.32, 0.5, 0.005])
    assert terms.metrics["value/clip_fraction"].result == pytest.approx(1 / 3)


def test_old_values_are_read_only_with_a_clip() -> None:
    assert ValueObjective().columns == {"returns"}
    assert ValueObjective(clip=0.1).columns == {"returns", "values"}


def test_prompt_is_not_trained_and_its_nan_is_ignored() -> None:
    objective, batch, head_outputs = (
        ValueObjective(clip=0.2),
        batch_of([1.0, 2.0], [0.5, 0.5]),
        answers_of([0.5, 0.5]),
    )
    loss = reduce_loss(
        objective(head_outputs, batch),
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )
    # d/dV of (V - R)^2 / 2, mean over 2 tokens: (0.5 - 1) / 2 and (0.5 - 2) / 2.
    (gradient,) = torch.autograd.grad(loss, head_outputs[HeadOutput.VALUE])
    assert gradient.tolist() == pytest.approx([0.0, -0.25, -0.75])


def test_explained_variance_merges_over_micro_batches() -> None:
    # Returns 0, 2, 4: variance 8/3. Errors R - V = 0, 1, -1: variance 2/3. So 1 - 0.25 = 0.75.
    parts = [
        ValueObjective()(answers_of([0.0, 1.0]), batch_of([0.0, 2.0])).metrics,
        ValueObjective()(answers_of([5.0]), batch_of([4.0])).metrics,
    ]
    assert compute_explained_variance(merge_metrics(parts)) == pytest.approx(0.75, abs=1e-6)


def test_constant_returns_have_no_explained_variance() -> None:
    assert math.isnan(
        compute_explained_variance(
            ValueObjective()(answers_of([1.0, 2.0]), batch_of([1.0, 1.0])).metrics
        )
    )
