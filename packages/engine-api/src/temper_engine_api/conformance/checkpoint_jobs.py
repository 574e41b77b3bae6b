"""What the laws of checkpoints have in common: train and save, load and train on, and what an engine counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.measure import WHOLE, Update, share_of, update_once
from temper_engine_api.conformance.probes import TokenProbe
from temper_engine_api.conformance.rank import Rank, Recipe
from temper_engine_api.engine import BaseEngine


def train(engine: BaseEngine, batches: Sequence[SequenceBatch]) -> list[Update]:
    """One update each."""
    engine.set_loss_fn(TokenProbe())
    return [update_once(engine, [share_of(engine, batch, split=WHOLE)]) for batch in batches]


def train_and_save(
    rank: Rank, *, recipe: Recipe, batches: list[SequenceBatch], folder: Path, step: int
) -> str:
    """The committed directory, as every rank is told."""
    engine = rank.engine(recipe)
    train(engine, batches)
    return engine.save_checkpoint(str(folder), global_step=step)


def load_and_train(
    rank: Rank, *, recipe: Recipe, batches: list[SequenceBatch], folder: Path
) -> list[Update]:
    """In an engine that has already trained something else, all of which must be forgotten."""
    engine = rank.engine(recipe)
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


def progress_of(engine: BaseEngine) -> Progress:
    """As it stands now."""
    return Progress(
        num_updates=engine.num_updates,
        num_schedule_steps=engine.num_schedule_steps,
        num_nonfinite_updates=engine.num_nonfinite_updates,
        lr=engine.current_lr,
        loss_scale=engine.loss_scale.value,
    )
