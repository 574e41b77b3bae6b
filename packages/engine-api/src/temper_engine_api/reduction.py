"""The one place where losses become a scalar. Every engine calls it; nothing else divides."""

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import Aggregation, AggregationMode, LossTerms


def reduce_loss(
    terms: LossTerms, batch: SequenceBatch, *, denominators: Denominators, aggregation: Aggregation
) -> Tensor:
    """This micro-batch's part of the mini-batch's loss.

    The parts of all micro-batches on all data-parallel ranks add up to the loss, so gradients are reduced by sum. A denominator of 0
    (nothing is trained) gives a finite zero that still carries the graph.

    Args:
        terms: what the objective returned for this micro-batch.
        batch: the micro-batch itself.
        denominators: of the whole mini-batch over all ranks.
        aggregation: the objective's.

    Returns:
        [] float32.

    Raises:
        BatchError: shapes or level do not fit the batch or the mode.
    """
    is_token_level = terms.level == "token"
    mask = batch.loss_mask if is_token_level else find_trained_sequences(batch)
    _check_terms(terms, mask, aggregation.mode)
    # Both are masked before they meet: 0 * NaN would leak into the gradient.
    loss = torch.where(mask, terms.loss.float(), 0.0)
    if terms.weight is not None:
        loss = loss * torch.where(mask, terms.weight.detach().float(), 0.0)
    mode = aggregation.mode
    if mode == AggregationMode.TOKEN_MEAN:
        return loss.sum() / max(denominators.tokens, 1)
    if mode == AggregationMode.GROUP_MEAN:
        return loss.sum() / max(denominators.groups, 1)
    if is_token_level and mode == AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN:
        trained = sum_per_sequence(batch.loss_mask.float(), batch).clamp(min=1.0)
        loss = loss / trained[batch.sequence_index]
    if mode == AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM:
        assert aggregation.horizon is not None
        loss = loss / aggregation.horizon
    return loss.sum() / max(denominators.sequences, 1)


def _check_terms(terms: LossTerms, mask: Tensor, mode: AggregationMode) -> None:
    for what, column in (("losses", terms.loss), ("weights", terms.weight)):
        if column is not None and column.shape != mask.shape:
            raise BatchError(
                f"the objective returned {what} of shape {tuple(column.shape)} at {terms.level} level; expected {tuple(mask.shape)}."
            )
    if terms.level == "token" and mode == AggregationMode.GROUP_MEAN:
        raise BatchError(
            "aggregation group_mean takes one loss per sequence, but the objective returned one per token."
        )
    if terms.level == "sequence" and mode == AggregationMode.TOKEN_MEAN:
        raise BatchError(
            "aggregation token_mean takes one loss per token, but the objective returned one per sequence."
        )


def sum_per_sequence(column: Tensor, batch: SequenceBatch) -> Tensor:
    """[B] sum of a per-token column [T] over each sequence, in the column's dtype, with gradient."""
    return column.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index, column)


def find_trained_sequences(batch: SequenceBatch) -> Tensor:
    """[B] bool: sequences with at least one trained token."""
    return sum_per_sequence(batch.loss_mask.float(), batch) > 0


def count_denominators(batch: SequenceBatch) -> Denominators:
    """Trained tokens, sequences and groups of a whole mini-batch, counted after all masking."""
    trained = find_trained_sequences(batch)
    groups = torch.unique(batch.group_ids[trained])
    return Denominators(
        tokens=int(batch.loss_mask.sum()), sequences=int(trained.sum()), groups=groups.numel()
    )
