"""A training loop with `forward_backward_step`, as users of the engine RFC write it.

The RFC is the proposal of the engine interface. This module has the loop, its hooks and its loss
functions; they work with any engine. Each data-parallel rank passes its own rows of a padded
mini-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.measurements import collect_state
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.hooks import (
    Context,
    LossFn,
    PostprocessFn,
    Predictions,
    PreprocessFn,
    RawBatch,
)
from temper_engine_api.objective import Objective
from temper_engine_api.padding import to_padded
from temper_engine_api.topology import Axis
from temper_engine_api.weights import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """Measurements of the loop on one rank."""

    dp: Axis
    """Data-parallel axis, with this rank's index on it."""
    losses: list[float]
    """Losses, in mini-batch order."""
    grad_norms: list[float]
    next_lrs: list[float]
    """Values that `lr_scheduler_step` returned."""
    num_hook_calls: object
    """Calls of both hooks, in training and evaluation together."""
    first_predictions: Tensor | None
    """Predictions [T] of the first mini-batch in training; None if the rank returns none."""
    evaluated: Tensor | None
    """Predictions [T] of the last mini-batch, forward only."""
    state: Mapping[str, TrainingState]
    """Portable state at the end, on rank 0."""


def preprocess_fn(batch: RawBatch, ctx: Context) -> tuple[RawBatch, Context]:
    """Count the call."""
    return batch, _counted(ctx)


def postprocess_fn(predictions: Predictions, ctx: Context) -> tuple[Predictions, Context]:
    """Count the call, and replace log-probs by costs; without them `mean_cost` raises KeyError."""
    return {"cost": -predictions["logprob"]}, _counted(ctx)


def _counted(ctx: Context) -> Context:
    assert ctx is not None
    calls = ctx["calls"]
    assert isinstance(calls, int)
    return {**ctx, "calls": calls + 1}


def mean_cost(
    data: SequenceBatch, predictions: Predictions, ctx: Context
) -> tuple[Tensor, Context]:
    """Return the mean cost of this rank's trained tokens."""
    return predictions["cost"][data.loss_mask].mean(), ctx


@dataclass(frozen=True, slots=True)
class MeanOfRankMeans:
    """Loss function for one rank that has all rows: `mean_cost` averaged across ranks."""

    num_ranks: int
    """Rank r has the rows r, r + num_ranks, ..."""

    def __call__(
        self, data: SequenceBatch, predictions: Predictions, ctx: Context
    ) -> tuple[Tensor, Context]:
        """Return the mean of the ranks' means."""
        owner_rank = data.sequence_index % self.num_ranks
        means = [
            predictions["cost"][data.loss_mask & (owner_rank == rank)].mean()
            for rank in range(self.num_ranks)
        ]
        # Each rank counts equally, however many tokens it trains: the loss function sees one rank's
        # rows only.
        return torch.stack(means).mean(), ctx


def rfc_loop(
    rank: Rank,
    *,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    loss_fn: Objective | LossFn,
    preprocess_fn: PreprocessFn | None = None,
    postprocess_fn: PostprocessFn | None = None,
) -> LoopResult:
    """Run the loop; rank r of n takes every n-th row, as a padded mapping."""
    engine = rank.temporary_engine(setup)
    dp = engine.topology.dp
    train_loader = [
        to_padded(batch.select(range(dp.rank, batch.num_sequences, dp.size))) for batch in batches
    ]
    hooks = _Hooks(preprocess_fn=preprocess_fn, postprocess_fn=postprocess_fn)
    ctx: Context = {"calls": 0}
    losses, grad_norms, next_lrs, predictions = [], [], [], []

    engine.set_loss_fn(loss_fn)
    for batch in train_loader:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            preds, loss, ctx = engine.forward_backward_step(batch, ctx, forward_only=False, **hooks)
        grad_norm = engine.optimizer_step()
        current_lr = engine.lr_scheduler_step()
        assert isinstance(loss, Tensor)
        losses.append(float(loss))
        grad_norms.append(grad_norm)
        next_lrs.append(current_lr)
        predictions.append(preds)
    with engine.eval_mode():
        evaluated, ctx = engine.forward_backward_step(
            train_loader[-1], ctx, forward_only=True, **hooks
        )

    assert ctx is not None
    return LoopResult(
        dp=dp,
        losses=losses,
        grad_norms=grad_norms,
        next_lrs=next_lrs,
        num_hook_calls=ctx["calls"],
        first_predictions=_only_column(predictions[0]),
        evaluated=_only_column(evaluated),
        state=collect_state(engine),
    )


class _Hooks(TypedDict):
    preprocess_fn: PreprocessFn | None
    postprocess_fn: PostprocessFn | None


def _only_column(predictions: Predictions | None) -> Tensor | None:
    return None if predictions is None else next(iter(predictions.values())).cpu()
