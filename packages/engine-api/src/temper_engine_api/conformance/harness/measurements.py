"""Jobs that measure one update or forward pass on every rank, and their results.

Gradients are read through the portable state. After one unclipped AdamW update with beta1 = 0 the
first moment is the gradient, in full shape and under Hugging Face names, however the engine shards
it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.inputs.failing_probe import InjectedError
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.engine import BaseEngine
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.updates import UpdateReport
from temper_engine_api.weights import TrainingState

UNLIMITED_TOKENS = 1 << 20
"""Token limit that no test batch reaches."""
SEED = 7
"""Seed that all tests pass to `Objective.prepare`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Division of a rank's slice into micro-batches."""

    name: str
    """Part of the test id."""
    min_micro_batches: int = 1
    """Minimum number; if there are fewer samples, empty micro-batches get a dummy."""
    is_dynamic: bool = False
    """True if the token limit just fits the longest pack group."""


ONE_MICRO_BATCH = Split(name="one")
TWO_MICRO_BATCHES = Split(name="two", min_micro_batches=2)
THREE_MICRO_BATCHES = Split(name="three", min_micro_batches=3)
FOUR_MICRO_BATCHES = Split(name="four", min_micro_batches=4)
FIVE_MICRO_BATCHES = Split(name="five", min_micro_batches=5)
DYNAMIC = Split(name="dynamic", is_dynamic=True)
SPLITS = (ONE_MICRO_BATCH, TWO_MICRO_BATCHES, FOUR_MICRO_BATCHES, DYNAMIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Measurements of one update on one rank."""

    metrics: Mapping[str, Metric]
    """Not merged with other ranks' metrics."""
    grad_norm: float
    """Return value of `optimizer_step`."""
    report: UpdateReport
    """`engine.last_update` after the step."""
    next_lr: float
    """Return value of `lr_scheduler_step`."""
    returns_outputs: bool
    """True if this rank's metrics and outputs count."""
    outputs: ForwardOutputs | None
    """The requested head outputs; None if none were requested or another rank returns them."""
    state: Mapping[str, TrainingState]
    """Portable state after the update, by name; empty on ranks other than 0."""

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; only valid if the optimizer was READ_GRADIENTS."""
        return {name: state.first_moment for name, state in self.state.items()}

    @property
    def masters(self) -> dict[str, Tensor]:
        """Master weights by name."""
        return {name: state.master for name, state in self.state.items()}


def rank_slice(
    engine: BaseEngine, batch: SequenceBatch, *, split: Split, objective: Objective | None = None
) -> PackedBatch:
    """Return this rank's part of a mini-batch, divided into micro-batches.

    The plan also satisfies the constraints of the engine's topology. If `objective` is given, its
    batch statistics are added first.
    """
    if objective is not None:
        batch = batch.with_columns(objective.prepare(batch, seed=SEED))
    tokens_per_group = batch.tokens.new_zeros(batch.num_sequences)
    _, group_index = torch.unique(batch.pack_group_ids, return_inverse=True)
    # The dynamic split has the smallest token limit that fits the longest pack group.
    max_group_tokens = int(tokens_per_group.index_add(0, group_index, batch.lengths).max())
    constraints = engine.topology.plan_constraints
    plan = plan_mini_batch(
        batch.lengths.tolist(),
        pack_group_ids=batch.pack_group_ids.tolist(),
        dp_size=engine.topology.dp.size,
        max_tokens=max_group_tokens + constraints.token_multiple
        if split.is_dynamic
        else UNLIMITED_TOKENS,
        constraints=replace(
            constraints,
            min_micro_batches=max(constraints.min_micro_batches, split.min_micro_batches),
        ),
    )
    return build_packed_batch(
        batch,
        plan=plan,
        rank=engine.topology.dp.rank,
        # Use the full mini-batch, because gradients are summed across ranks and not averaged.
        denominators=count_denominators(batch),
    )


def run_update(
    engine: BaseEngine,
    local_batches: Collection[PackedBatch],
    *,
    outputs: Collection[HeadOutput] = (),
    mark_final: bool = True,
    zeroes_gradients: bool = True,
) -> Update:
    """Zero gradients, run one backward call per local batch, then step.

    Args:
        engine: An engine with a loss.
        local_batches: Slices of this rank, one per call.
        outputs: Head outputs to return from the last call.
        mark_final: Pass `final=True` to the last call. If False, `optimizer_step` has to reduce the
            gradients.
        zeroes_gradients: Call `optimizer_zero_grad` first. If False, the caller has done so.
    """
    if zeroes_gradients:
        engine.optimizer_zero_grad()
    with engine.train_mode():
        for number, local_batch in enumerate(local_batches, start=1):
            result = engine.forward_backward_batch(
                local_batch,
                forward_only=False,
                outputs=outputs,
                final=mark_final and number == len(local_batches),
            )
    grad_norm = engine.optimizer_step()
    assert engine.last_update is not None
    return Update(
        metrics=result.metrics,
        grad_norm=grad_norm,
        report=engine.last_update,
        next_lr=engine.lr_scheduler_step(),
        returns_outputs=engine.topology.returns_outputs,
        outputs=result.outputs,
        state=collect_state(engine),
    )


def collect_state(engine: BaseEngine) -> dict[str, TrainingState]:
    """Return the portable state by name, on the CPU; empty on ranks other than 0."""
    # The export is collective, so every rank must iterate it.
    with engine.export_state() as stream:
        state = {entry.name: _on_host(entry) for entry in stream}
    return state if engine.topology.global_rank == 0 else {}


def collect_weights(engine: BaseEngine) -> dict[str, Tensor]:
    """Return exported weights by name, on the CPU, in stream order."""
    with engine.export_weights() as stream:
        return {name: tensor.cpu() for name, tensor in stream}


def _on_host(entry: TrainingState) -> TrainingState:
    """Copy an entry to the CPU, where expected values are computed."""
    return replace(
        entry,
        master=entry.master.cpu(),
        first_moment=entry.first_moment.cpu(),
        second_moment=entry.second_moment.cpu(),
    )


def merge_update_metrics(updates: Collection[Update]) -> dict[str, float]:
    """Merge the metrics from all ranks, as a trainer logs them."""
    parts = [update.metrics for update in updates if update.returns_outputs]
    return {name: metric.result for name, metric in merge_metrics(parts).items()}


def measure_update(
    rank: Rank,
    *,
    setup: EngineSetup,
    objective: Objective,
    batch: SequenceBatch,
    split: Split = ONE_MICRO_BATCH,
    outputs: Collection[HeadOutput] = (),
) -> Update:
    """Run one update that leaves weights unchanged; by default it reads gradients."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(objective)
    return run_update(
        engine, [rank_slice(engine, batch, split=split, objective=objective)], outputs=outputs
    )


def measure_updates(
    rank: Rank,
    *,
    setup: EngineSetup,
    objective: Objective,
    batches: Collection[SequenceBatch],
    split: Split = ONE_MICRO_BATCH,
) -> list[Update]:
    """Run one update per mini-batch in a new engine."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(objective)
    return [
        run_update(engine, [rank_slice(engine, batch, split=split, objective=objective)])
        for batch in batches
    ]


def measure_outputs(
    rank: Rank,
    *,
    setup: EngineSetup,
    batch: SequenceBatch,
    requested_outputs: Collection[HeadOutput],
    split: Split = ONE_MICRO_BATCH,
) -> ForwardOutputs:
    """Run a forward pass in `eval_mode`; return all outputs in batch order on every rank."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=split), forward_only=True, outputs=requested_outputs
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


def fail_during_training(engine: BaseEngine, local_batch: PackedBatch, *, is_final: bool) -> None:
    """Run a backward pass, then raise inside `train_mode`."""
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
        raise InjectedError


def train(engine: BaseEngine, batches: Sequence[SequenceBatch]) -> list[Update]:
    """Run one update per mini-batch."""
    engine.set_loss_fn(ClippedPpoProbe())
    return [
        run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)]) for batch in batches
    ]


def train_without_stop(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> list[Update]:
    """Run one update per batch without a checkpoint."""
    return train(rank.temporary_engine(setup), batches)


def train_and_save(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path, step: int
) -> str:
    """Train a new engine and save; return the step's directory."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    return engine.save_checkpoint(str(folder), global_step=step)


def load_and_train(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> list[Update]:
    """Load a checkpoint into an engine with other weights and moments, then train.

    The updates before loading must leave no trace.
    """
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    engine.load_checkpoint(str(folder))
    return train(engine, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of an engine."""

    num_updates: int
    num_schedule_steps: int
    num_nonfinite_updates: int
    lr: float
    loss_scale: float


def read_progress(engine: BaseEngine) -> Progress:
    """Return the engine's counters."""
    return Progress(
        num_updates=engine.num_updates,
        num_schedule_steps=engine.num_schedule_steps,
        num_nonfinite_updates=engine.num_nonfinite_updates,
        lr=engine.current_lr,
        loss_scale=engine.loss_scale.value,
    )
