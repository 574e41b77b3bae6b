"""Reduction of per-token and per-sequence losses to a scalar, the same for all engines."""

from collections.abc import Mapping

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch
from temper_engine_api.errors import BatchError, EngineStateError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutputs,
    LossTerms,
    Objective,
)


def reduce_loss(
    terms: LossTerms, batch: SequenceBatch, *, denominators: Denominators, aggregation: Aggregation
) -> Tensor:
    """Compute a micro-batch's contribution to its mini-batch's loss.

    The contributions of all micro-batches on all data-parallel ranks add up to the loss, so
    gradients are reduced by sum, not by mean. If no token is trained, the result is a zero with a
    graph, so that the backward pass can run its collectives.

    Args:
        terms: Losses and weights for this micro-batch.
        batch: The micro-batch.
        denominators: Counts for the mini-batch across all ranks.
        aggregation: Aggregation of the objective.

    Returns:
        [] float32.

    Raises:
        BatchError: If shapes or level do not match the batch or the aggregation mode.

    Example:
        >>> from temper_engine_api.batch import from_sequences
        >>> batch = from_sequences([torch.tensor([5, 6, 7])], loss_masks=[torch.arange(3) > 0])
        >>> terms = LossTerms(loss=torch.tensor([9.0, 1.0, 2.0]))
        >>> denominators = count_denominators(batch)
        >>> float(
        ...     reduce_loss(terms, batch, denominators=denominators, aggregation=Aggregation())
        ... )
        1.5
    """
    is_token_level = terms.level == "token"
    mask = batch.loss_mask if is_token_level else find_trained_sequences(batch)
    _check_terms(terms, mask, aggregation.mode)
    # Mask loss and weight before they are multiplied: 0 * NaN is NaN, also in the gradient.
    loss = torch.where(mask, terms.loss.float(), 0.0)
    if terms.weight is not None:
        # Detached: a weight such as an importance ratio must not add its own gradient.
        loss = loss * torch.where(mask, terms.weight.detach().float(), 0.0)
    mode = aggregation.mode
    if mode == AggregationMode.TOKEN_SUM:
        return loss.sum()
    if mode == AggregationMode.TOKEN_MEAN:
        # At least 1, because a fully masked mini-batch has the loss 0 and not 0 / 0.
        return loss.sum() / max(denominators.tokens, 1)
    if mode == AggregationMode.GROUP_MEAN:
        return loss.sum() / max(denominators.groups, 1)
    if is_token_level and mode == AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN:
        # A fully masked sequence has only zeros, but 0 / 0 would be NaN.
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
                f"the objective returned {what} of shape {tuple(column.shape)} at {terms.level} "
                f"level, but the batch needs {tuple(mask.shape)}."
            )
    if terms.level == "token" and mode == AggregationMode.GROUP_MEAN:
        raise BatchError(
            "aggregation group_mean needs one loss per sequence, but the objective returned one "
            "per token: use another aggregation."
        )
    if terms.level == "sequence" and mode in (
        AggregationMode.TOKEN_MEAN,
        AggregationMode.TOKEN_SUM,
    ):
        raise BatchError(
            f"aggregation {mode.value} needs one loss per token, but the objective returned one "
            "per sequence: use another aggregation."
        )


def sum_per_sequence(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Sum a per-token column [T] over each sequence to [B], in its dtype, with gradient."""
    # index_add and not a loop over sequences, which would launch one kernel for each.
    return column.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index, column)


def find_trained_sequences(batch: SequenceBatch) -> Tensor:
    """Return [B] bool, True for sequences with at least one trained token."""
    return sum_per_sequence(batch.loss_mask.float(), batch) > 0


def count_denominators(batch: SequenceBatch) -> Denominators:
    """Count trained tokens, sequences and groups in a mini-batch; call it after all masking.

    Args:
        batch: The mini-batch across all ranks, not one rank's sequences.
    """
    trained = find_trained_sequences(batch)
    groups = torch.unique(batch.group_ids[trained])
    return Denominators(
        tokens=int(batch.loss_mask.sum()), sequences=int(trained.sum()), groups=groups.numel()
    )


class ObjectiveLoss:
    """An objective's loss on each micro-batch of a packed batch; collects the metrics."""

    def __init__(self, objective: Objective, *, batch: PackedBatch) -> None:
        missing = objective.columns - batch.columns.keys() - batch.sequence_columns.keys()
        if missing:
            raise EngineStateError(
                f"objective {objective.name!r} needs columns that the batch does not have: "
                f"{sorted(missing)}. Add them with batch.with_columns()."
            )
        self.required_outputs = objective.required_outputs
        self.metrics: list[Mapping[str, Metric]] = []
        self._objective = objective
        self._denominators = batch.denominators

    def __call__(self, head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
        """Compute the loss for one micro-batch: the scalar whose gradient is computed."""
        terms = self._objective(head_outputs, micro)
        loss = reduce_loss(
            terms,
            micro,
            denominators=self._denominators,
            aggregation=self._objective.aggregation,
        )
        # A sum, because each value is a contribution that is already divided by the denominators.
        self.metrics.append({"loss": Metric(value=loss.detach(), reduction="sum"), **terms.metrics})
        return loss
