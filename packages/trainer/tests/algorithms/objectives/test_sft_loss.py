"""Supervised fine-tuning."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.supervised_losses import SftObjective
from temper_trainer.algorithms.sft_losses import Dft
from temper_trainer.batching.samples import demonstrations_to_samples
from temper_trainer.types import Demonstration, Prompt


def test_loss_is_the_mean_over_all_trained_tokens_not_over_sequences() -> None:
    # Trained log-probs -1 | -2, -3, -4: (1 + 2 + 3 + 4) / 4 = 2.5, where the mean of sequence means
    # would be (1 + 3) / 2 = 2.
    batch = from_sequences(
        [torch.arange(3), torch.arange(4)], loss_masks=[torch.arange(3) >= 2, torch.arange(4) >= 1]
    )
    head_outputs = HeadOutputs(
        columns={HeadOutput.LOGPROB: torch.tensor([0.0, -9.0, -1.0, 0.0, -2.0, -3.0, -4.0])}
    )
    objective = SftObjective()
    terms = objective(head_outputs, batch)
    loss = reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=objective.aggregation
    )
    assert float(loss) == pytest.approx(2.5)
    assert terms.metrics["sft/nll"].result == pytest.approx(2.5)


def test_dft_weights_each_token_with_its_own_probability() -> None:
    batch = from_sequences([torch.arange(4)], loss_masks=[torch.arange(4) >= 2])
    logprobs = torch.tensor([0.0, -9.0, -1.0, -2.0], requires_grad=True)
    objective = SftObjective(loss=Dft())
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: logprobs}), batch)
    loss = reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=objective.aggregation
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # e^-1 = 0.367879, e^-2 = 0.135335: (0.367879 * 1 + 0.135335 * 2) / 2 = 0.319275.
    assert float(loss.detach()) == pytest.approx(0.319275, abs=1e-6)
    # The gradient of a log-prob is -p / 2, without a gradient through the weight.
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -0.183940, -0.067668], abs=1e-6)
    # The likelihood is reported for comparison with other losses: (1 + 2) / 2.
    assert terms.metrics["sft/nll"].result == pytest.approx(1.5)


def test_weighted_loss_is_divided_by_the_sum_of_the_weights() -> None:
    prompt = Prompt(prompt_id=0, text="", tokens=(1,), answer="")
    batch = demonstrations_to_samples(
        [
            Demonstration(prompt=prompt, tokens=(2, 3), loss_weights=(0.5, 2.0)),
            Demonstration(prompt=prompt, tokens=(2, 3), loss_weights=(1.5, 0.0)),
        ]
    )
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -4.0, -9.0], requires_grad=True)
    objective = SftObjective(has_weights=True)
    batch = batch.with_columns(objective.prepare(batch, seed=0))
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: logprobs}), batch)
    loss = reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=objective.aggregation
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # (0.5 * 1 + 2 * 2 + 1.5 * 4) / (0.5 + 2 + 1.5) = 10.5 / 4; each gradient is -w / 4.
    assert float(loss.detach()) == pytest.approx(2.625)
    assert gradient.tolist() == pytest.approx([0.0, -0.125, -0.5, 0.0, -0.375, 0.0])
    # The likelihood of the three trained tokens, unweighted: (1 + 2 + 4) / 3.
    assert terms.metrics["sft/nll"].result == pytest.approx(7 / 3)


def test_equal_weights_change_nothing() -> None:
    batch = from_sequences(
        [torch.arange(4)],
        loss_masks=[torch.arange(4) >= 2],
        columns={"loss_weights": [torch.full((4,), 0.1)]},
    )
    prepared = SftObjective(has_weights=True).prepare(batch, seed=0)["scaled_loss_weights"]
    assert prepared[batch.loss_mask].tolist() == pytest.approx([1.0, 1.0])


def test_weights_of_a_batch_without_trained_tokens_are_zero() -> None:
    batch = from_sequences(
        [torch.arange(2)],
        loss_masks=[torch.zeros(2, dtype=torch.bool)],
        columns={"loss_weights": [torch.ones(2)]},
    )
    prepared = SftObjective(has_weights=True).prepare(batch, seed=0)["scaled_loss_weights"]
    assert prepared.tolist() == [0.0, 0.0]
