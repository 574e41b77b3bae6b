"""Conformance tests of checkpoints: resume, background saves, other layouts."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Progress,
    Update,
    load_and_train,
    merge_update_metrics,
    rank_slice,
    read_progress,
    train,
    train_and_save,
    train_without_stop,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    LOSS_TERM_SCALE,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import (
    CapabilityError,
    CheckpointError,
)
from temper_engine_api.specs import ScheduleSpec
from temper_engine_api.updates import INITIAL_LOSS_SCALE

COSINE = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)


@pytest.fixture
def setup(oracle: OracleCache) -> EngineSetup:
    """An engine setup whose learning rate changes at every step."""
    return oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=COSINE)


@pytest.fixture
def batches(oracle: OracleCache) -> list[SequenceBatch]:
    """Four mini-batches."""
    return [oracle.get_batch(seed=seed) for seed in range(4)]


def test_resume_is_bitwise(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A run resumed from a checkpoint has the state, norms, rates and losses of an unbroken run."""
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches)
    # The step is not the update count: a trainer counts skipped updates and mini-batches.
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=7)
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )
    for number in range(2):
        updates, expected_updates = (
            [updates_of_rank[-2 + number] for updates_of_rank in updates_by_rank]
            for updates_by_rank in (resumed, uninterrupted)
        )
        for update, expected in zip(updates, expected_updates, strict=True):
            assert_same_state(update.state, expected.state)
            assert (update.grad_norm, update.next_lr) == (expected.grad_norm, expected.next_lr)
        assert (
            merge_update_metrics(updates)["loss"] == merge_update_metrics(expected_updates)["loss"]
        )


def test_saving_changes_nothing(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """Saving between two updates does not change the second one."""
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:2])[0]
    with_save = engine_under_test.run(
        train_save_train, setup=setup, batches=batches[:2], folder=tmp_path
    )[0]
    assert_same_state(with_save.state, uninterrupted[1].state)


def test_saving_between_backward_and_step_keeps_gradients(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A save between the backward pass and the step does not change the update."""
    for saved, undisturbed in engine_under_test.run(
        update_around_a_save, setup=setup, batch=batches[0], folder=tmp_path
    ):
        assert saved == undisturbed


def update_around_a_save(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, folder: Path
) -> tuple[float, float]:
    """Return the gradient norms from an update with a save before its step, and one without."""
    norms = []
    for number in range(2):
        engine = rank.temporary_engine(setup)
        engine.set_loss_fn(ClippedPpoProbe())
        with engine.train_mode():
            engine.forward_backward_batch(
                rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
            )
        if number == 0:
            engine.save_checkpoint(str(folder), global_step=1)
        norms.append(engine.optimizer_step())
    return norms[0], norms[1]


@pytest.mark.if_claimed(Capability.BACKGROUND_SAVE)
def test_background_save_captures_the_state_at_the_call(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A background save holds the state at the call, although training continues.

    Training must not be disturbed either.
    """
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches)[0]
    continued = engine_under_test.run(
        train_while_saving, setup=setup, batches=batches, folder=tmp_path
    )[0]
    assert_same_state(continued[-1].state, uninterrupted[-1].state)
    assert list_complete_steps(tmp_path) == [1, 2]
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )[0]
    for update, expected in zip(resumed, uninterrupted[2:], strict=True):
        assert_same_state(update.state, expected.state)


def train_while_saving(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> list[Update]:
    """Save the first two updates in the background while the next ones run."""
    engine = rank.temporary_engine(setup)
    updates = []
    for step, batch in enumerate(batches, start=1):
        updates += train(engine, [batch])
        if step <= 2:
            engine.save_checkpoint(str(folder), global_step=step, in_background=True)
    engine.finish_saving()
    return updates


@pytest.mark.if_claimed(Capability.BACKGROUND_SAVE)
def test_failed_background_save_raises_on_every_rank(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A later `optimizer_step` raises the save's error on every rank and loses no update.

    The step's folder exists already, so the background save fails.
    """
    # A failure that occurs in practice, without a change to the engine.
    (tmp_path / "step_00000001").mkdir()
    for message, num_updates in engine_under_test.run(
        train_until_error, setup=setup, batches=batches, folder=tmp_path
    ):
        assert "step_00000001 already exists" in message
        assert num_updates == len(batches), (
            "calling optimizer_step again after the error must apply the update"
        )


def train_until_error(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> tuple[str, int]:
    """Return the message `optimizer_step` raises, and the updates made after a retry."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    engine.save_checkpoint(str(folder), global_step=1, in_background=True)
    message = ""
    for batch in batches:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(
                rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
            )
        # Give the background save time to fail; a later step must then report it.
        time.sleep(0.5)
        try:
            engine.optimizer_step()
        except CheckpointError as error:
            message = str(error)
            engine.optimizer_step()
    return message, engine.num_updates


@pytest.mark.if_not_claimed(Capability.BACKGROUND_SAVE)
def test_unclaimed_background_save_is_rejected(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    """A background save raises CapabilityError if the engine does not claim it."""
    engine_under_test.run(save_in_background_unclaimed, setup=setup, folder=tmp_path)


def save_in_background_unclaimed(rank: Rank, *, setup: EngineSetup, folder: Path) -> None:
    """Request a background save from an engine that does not claim it."""
    engine = rank.temporary_engine(setup)
    with pytest.raises(CapabilityError, match="background_save"):
        engine.save_checkpoint(str(folder), global_step=1, in_background=True)


def train_save_train(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> Update:
    """Run one update, save, run another update."""
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    engine.save_checkpoint(str(folder), global_step=1)
    return train(engine, batches[1:])[0]


def test_counters_and_learning_rate_are_resumed(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """Counters and learning rate are restored, with one skipped update among the three."""
    # With the skip, the update count differs from the batch count.
    bad = batches[1].with_columns(
        {"advantages": torch.full_like(batches[1].columns["advantages"], torch.inf)}
    )
    for saved, loaded in engine_under_test.run(
        measure_progress_around_a_save,
        setup=setup,
        batches=[batches[0], bad, batches[2]],
        folder=tmp_path,
    ):
        assert loaded == saved
        assert (saved.num_updates, saved.num_schedule_steps, saved.num_nonfinite_updates) == (
            2,
            2,
            1,
        )


@pytest.mark.if_claimed(Capability.FP16)
def test_fp16_loss_scale_is_halved_and_resumed(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """An overflow halves the fp16 loss scale on every rank, and the scale is restored."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=COSINE, compute="fp16")
    # The second one overflows fp16 once the loss is scaled; every rank sees it in the global norm.
    # The others are far below: with experts, a whole mini-batch on one rank would overflow too.
    scaled = [
        batch.with_columns({"advantages": batch.columns["advantages"] * factor})
        for batch, factor in zip(batches[:3], (0.01, 1e9, 0.01), strict=True)
    ]
    for saved, loaded in engine_under_test.run(
        measure_progress_around_a_save, setup=setup, batches=scaled, folder=tmp_path
    ):
        assert loaded == saved
        assert (saved.num_updates, saved.num_schedule_steps, saved.num_nonfinite_updates) == (
            2,
            2,
            1,
        )
        assert saved.loss_scale == INITIAL_LOSS_SCALE / 2


def measure_progress_around_a_save(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> tuple[Progress, Progress]:
    """Return the progress before the save, and of a new engine after loading."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    engine.save_checkpoint(str(folder), global_step=3)
    other = rank.temporary_engine(setup)
    other.load_checkpoint(str(folder))
    return read_progress(engine), read_progress(other)


def test_random_state_is_resumed(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    """After loading, torch draws the numbers that it drew after the save."""
    for after_save, after_load in engine_under_test.run(
        draw_around_a_save, setup=setup, folder=tmp_path
    ):
        assert torch.equal(after_save, after_load)


def draw_around_a_save(rank: Rank, *, setup: EngineSetup, folder: Path) -> tuple[Tensor, Tensor]:
    """Return what torch draws after a save, and after loading it."""
    engine = rank.temporary_engine(setup)
    # Another seed on each rank: restoring rank 0's RNG state everywhere must fail.
    torch.manual_seed(rank.index + 5)
    engine.save_checkpoint(str(folder), global_step=0)
    after_save = torch.rand(4)
    # Move the RNG on, so that a load which restores nothing gives other numbers.
    torch.rand(7)
    engine.load_checkpoint(str(folder))
    return after_save, torch.rand(4)


@pytest.mark.if_claimed(Capability.RESHARD_ON_LOAD)
def test_resume_in_another_layout_gives_the_same_loss(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A checkpoint resumes in other layouts and world sizes with the same next loss and rate."""
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:3])
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    # Three layouts cover the cases without trying all pairs: this one, the first and the next one.
    layouts = engine_under_test.comparable_layouts
    for other in {
        layouts[0],
        engine_under_test.layout,
        layouts[(layouts.index(engine_under_test.layout) + 1) % len(layouts)],
    }:
        resumed = engine_under_test.run_in(
            other, load_and_train, setup=setup, batches=batches[2:3], folder=tmp_path
        )
        losses = [
            merge_update_metrics([updates_of_rank[-1] for updates_of_rank in updates_by_rank])[
                "loss"
            ]
            for updates_by_rank in (resumed, uninterrupted)
        ]
        assert_close(
            losses[0],
            losses[1],
            LOSS,
            quantity=f"next loss at {other.name}",
            min_scale=LOSS_TERM_SCALE,
        )
        assert resumed[0][-1].next_lr == uninterrupted[0][-1].next_lr
