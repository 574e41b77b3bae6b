"""Batches of a few tokens, and what an objective says of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs, Objective
from temper_engine_api.reduction import count_denominators, reduce_loss


def batch_of(*sequences: dict[str, list[float]]) -> SequenceBatch:
    """Build sequences from columns; the first token of each is the prompt, with NaN columns."""
    lengths = [len(next(iter(columns.values()))) + 1 for columns in sequences]
    names = sequences[0].keys()
    columns = {
        name: [torch.tensor([math.nan, *sequence[name]]) for sequence in sequences]
        for name in names
    }
    masks = [torch.arange(n) >= 1 for n in lengths]
    return from_sequences([torch.arange(n) for n in lengths], loss_masks=masks, columns=columns)


def answers_of(*logprobs: list[float]) -> HeadOutputs:
    full_logprobs = [x for sequence in logprobs for x in (0.0, *sequence)]
    return HeadOutputs(
        columns={
            HeadOutput.LOGPROB: torch.tensor(full_logprobs, requires_grad=True),
            HeadOutput.ENTROPY: torch.full((len(full_logprobs),), 0.5),
        }
    )


def losses(objective: Objective, head_outputs: HeadOutputs, batch: SequenceBatch) -> list[float]:
    """Return the losses at the trained tokens."""
    prepared = batch.with_columns(objective.prepare(batch, seed=1))
    token_losses: list[float] = objective(head_outputs, prepared).loss[batch.loss_mask].tolist()
    return token_losses


def gradient(
    objective: Objective, head_outputs: HeadOutputs, batch: SequenceBatch
) -> Sequence[float]:
    """Return the gradient of the reduced loss with respect to the trained log-probs."""
    prepared = batch.with_columns(objective.prepare(batch, seed=1))
    terms = objective(head_outputs, prepared)
    loss = reduce_loss(
        terms, prepared, denominators=count_denominators(batch), aggregation=objective.aggregation
    )
    logprob_gradient: Tensor = torch.autograd.grad(loss, head_outputs[HeadOutput.LOGPROB])[0]
    return logprob_gradient[batch.loss_mask].tolist()
