"""Supervised fine-tuning."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.sft_losses import Dft
from temper_trainer.algorithms.supervised_losses import SftObjective


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
