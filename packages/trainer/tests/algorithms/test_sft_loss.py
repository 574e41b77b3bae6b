"""Supervised fine-tuning."""

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
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
