"""Jobs that run one update or one forward pass on every rank, and what they bring back: how the kit reads any engine's numbers.

Gradients are read through the portable state: after one unclipped update whose first decay is 0, the first moment is the gradient,
under Hugging Face names and in full shape, however the engine shards it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.engine import BaseEngine, UpdateReport
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.weights import TrainingState

UNLIMITED_TOKENS = 1 << 20
SEED = 7
"""Of ``Objective.prepare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a rank's share is cut into micro-batches."""

    name: str
    """Of the test."""
    min_micro_batches: int = 1
    """At least so many; empty ones hold a dummy."""
    is_dynamic: bool = False
    """Whether the cap of tokens is as low as the longest atom allows."""


ONE_MICRO_BATCH = Split(name="one")
TWO_MICRO_BATCHES = Split(name="two", min_micro_batches=2)
FOUR_MICRO_BATCHES = Split(name="four", min_micro_batches=4)
DYNAMIC = Split(name="dynamic", is_dynamic=True)
SPLITS = (ONE_MICRO_BATCH, TWO_MICRO_BATCHES, FOUR_MICRO_BATCHES, DYNAMIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update on one rank."""

    metrics: Mapping[str, Metric]
    """This rank's part."""
    grad_norm: float
    """What ``optimizer_step`` returned."""
    report: UpdateReport
    """What it left behind."""
    next_lr: float
    """What ``lr_scheduler_step`` returned."""
    returns_outputs: bool
    """Whether this rank's metrics and outputs count."""
    outputs: ForwardOutputs | None
    """What was asked for, if anything."""
    state: Mapping[str, TrainingState]
    """After the update, by name; on rank 0 only."""

    @property
    def gradients(self) -> dict[str, Tensor]:
        """By name, where the update was made with ``READ_GRADIENTS``."""
        return {name: state.first_moment for name, state in self.state.items()}

    @property
    def masters(self) -> dict[str, Tensor]:
        """Weights by name."""
        return {name: state.master for name, state in self.state.items()}


def rank_slice(
    engine: BaseEngine, batch: SequenceBatch, *, split: Split, objective: Objective | None = None
) -> PackedBatch:
    """This rank's share of a mini-batch that every rank holds whole, cut as asked within what the engine's layout allows."""
    if objective is not None:
        batch = batch.with_columns(objective.prepare(batch, seed=SEED))
    atom_tokens = batch.tokens.new_zeros(batch.num_sequences)
    _, atom_of = torch.unique(batch.pack_group_ids, return_inverse=True)
    longest_atom = int(atom_tokens.index_add(0, atom_of, batch.lengths).max())
    constraints = engine.topology.plan_constraints
    plan = plan_mini_batch(
        batch.lengths.tolist(),
        pack_group_ids=batch.pack_group_ids.tolist(),
        dp_size=engine.topology.dp.size,
        max_tokens=longest_atom + constraints.token_multiple
        if split.is_dynamic
        else UNLIMITED_TOKENS,
        constraints=replace(
            constraints,
            min_micro_batches=max(constraints.min_micro_batches, split.min_micro_batches),
        ),
    )
    return build_packed_batch(
        batch, plan=plan, rank=engine.topology.dp.rank, denominators=count_denominators(batch)
    )


def run_update(
    engine: BaseEngine,
    local_batches: Collection[PackedBatch],
    *,
    outputs: Collection[HeadOutput] = (),
    mark_final: bool = True,
) -> Update:
    """One update from zeroed gradients, one call per share; the last is final unless the step is left to finalise."""
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
    """The portable state by name, in host memory, on rank 0; the others only take part."""
    state = {entry.name: _on_host(entry) for entry in engine.export_state()}
    return state if engine.topology.global_rank == 0 else {}


def collect_weights(engine: BaseEngine) -> dict[str, Tensor]:
    """Exported weights by name, in host memory, in the order of the stream."""
    with engine.export_weights() as stream:
        return {name: tensor.cpu() for name, tensor in stream}


def _on_host(entry: TrainingState) -> TrainingState:
    """An engine may give its state where it computes; expected numbers are on the CPU."""
    return replace(
        entry,
        master=entry.master.cpu(),
        first_moment=entry.first_moment.cpu(),
        second_moment=entry.second_moment.cpu(),
    )


def merge_update_metrics(updates: Collection[Update]) -> dict[str, float]:
    """Metrics of one update over all ranks, as they would be logged."""
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
    """One update of a recipe that leaves weights alone; by default it reads gradients."""
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
    """Several updates of a new engine, one per mini-batch."""
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
    """A forward pass in ``eval_mode``: the outputs of all ranks in the order of the batch, on every rank."""
    engine = rank.cached_engine(setup)
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=split), forward_only=True, outputs=requested_outputs
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


class InjectedError(Exception):
    """Raised by a body."""


def fail_during_training(engine: BaseEngine, local_batch: PackedBatch, *, is_final: bool) -> None:
    """A backward pass, and then trouble."""
    with engine.train_mode():
        engine.forward_backward_batch(local_batch, forward_only=False, final=is_final)
        raise InjectedError


def train(engine: BaseEngine, batches: Sequence[SequenceBatch]) -> list[Update]:
    """One update each."""
    engine.set_loss_fn(ClippedPpoProbe())
    return [
        run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)]) for batch in batches
    ]


def train_and_save(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path, step: int
) -> str:
    """The committed directory, as every rank is told."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    return engine.save_checkpoint(str(folder), global_step=step)


def load_and_train(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> list[Update]:
    """In an engine that has already trained something else, all of which must be forgotten."""
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    engine.load_checkpoint(str(folder))
    return train(engine, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an engine counts."""

    num_updates: int
    num_schedule_steps: int
    num_nonfinite_updates: int
    lr: float
    loss_scale: float


def read_progress(engine: BaseEngine) -> Progress:
    """As it stands now."""
    return Progress(
        num_updates=engine.num_updates,
        num_schedule_steps=engine.num_schedule_steps,
        num_nonfinite_updates=engine.num_nonfinite_updates,
        lr=engine.current_lr,
        loss_scale=engine.loss_scale.value,
    )
