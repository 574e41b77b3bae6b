"""Conversions between the padded [B, L] tensors of other projects and our flat batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, SequenceBatch, from_sequences
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, Objective
from temper_engine_api.reduction import count_denominators, reduce_loss


class NoCounterpartError(NotImplementedError):
    """We have no counterpart of what a test asks for; the plugin skips the test."""


def build_batch(
    mask: Tensor,
    *,
    group_ids: Sequence[int] | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> SequenceBatch:
    """Return a batch with one prompt token before each row, because its first token has no label.

    Args:
        mask: [B, L] of trained tokens; nonzero is trained.
        group_ids: B ids of prompts.
        columns: [B, L] columns of the batch.
    """
    num_rows, length = mask.shape
    is_trained = torch.cat([torch.zeros(num_rows, 1, dtype=torch.bool), mask.bool()], dim=1)
    tokens = torch.zeros(length + 1, dtype=torch.int64)
    batch = from_sequences([tokens] * num_rows, loss_masks=list(is_trained), group_ids=group_ids)
    return batch.with_columns(
        {name: flatten(column.detach()) for name, column in (columns or {}).items()}
    )


def flatten(column: Tensor) -> Tensor:
    """Return a [B, L] column as [B * (L + 1)], with 0 at the prompt tokens."""
    return torch.nn.functional.pad(column, (1, 0)).reshape(-1)


def unflatten(column: Tensor, mask: Tensor) -> Tensor:
    """Return a flat column in the shape [B, L] and the type float32."""
    return column.reshape(mask.shape[0], -1)[:, 1:].float()


def compute_loss(
    objective: Objective,
    *,
    mask: Tensor,
    output: tuple[HeadOutput, Tensor],
    columns: Mapping[str, Tensor],
    denominators: Denominators | None = None,
) -> Tensor:
    """Return the reduced loss of an objective.

    Args:
        objective: With its aggregation.
        mask: [B, L].
        output: Output of the model and its [B, L] values, with gradient.
        columns: [B, L] columns of the batch.
        denominators: Counts of the mini-batch; None counts this batch.
    """
    batch = build_batch(mask, columns=columns)
    name, values = output
    batch = batch.with_columns(objective.prepare(batch, seed=0))
    terms = objective(HeadOutputs(columns={name: flatten(values)}), batch)
    aggregation = getattr(objective, "aggregation", Aggregation())
    return reduce_loss(
        terms,
        batch,
        denominators=denominators or count_denominators(batch),
        aggregation=aggregation,
    )


def compute_token_losses(
    objective: Objective,
    *,
    mask: Tensor,
    output: tuple[HeadOutput, Tensor],
    columns: Mapping[str, Tensor],
) -> Tensor:
    """Return the losses [B, L] of an objective before the reduction."""
    batch = build_batch(mask, columns=columns)
    name, values = output
    return unflatten(objective(HeadOutputs(columns={name: flatten(values)}), batch).loss, mask)
