"""Conformance tests of step directories: damage, failed saves, retention, remote copies."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    collect_state,
    load_and_train,
    train,
    train_and_save,
    train_without_stop,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.rank_pool import RankFailureError
from temper_engine_api.conformance.harness.tolerances import (
    assert_same_state,
)
from temper_engine_api.conformance.inputs.tiny_models import OTHER_SHAPES, QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_engine_api.layout import default_layout
from temper_engine_api.specs import ScheduleSpec
from temper_engine_api.weights import TrainingState

DAMAGE_KINDS = ("altered", "truncated", "removed")
COSINE = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)


@pytest.fixture
def setup(oracle: OracleCache) -> EngineSetup:
    """An engine setup whose learning rate changes at every step."""
    return oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=COSINE)


@pytest.fixture
def batches(oracle: OracleCache) -> list[SequenceBatch]:
    """Four mini-batches."""
    return [oracle.get_batch(seed=seed) for seed in range(4)]


def test_damaged_checkpoint_is_rejected_naming_the_file(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """An altered, truncated or removed file raises DamagedCheckpointError with its name.

    The largest engine file is damaged. The engine's state must not change.
    """
    step = Path(
        engine_under_test.run(
            train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1
        )[0]
    )
    file = max(
        # The largest file holds tensors, whose damage no parser would notice.
        (path for path in (step / "engine").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    copies = {kind: tmp_path / kind / step.name for kind in DAMAGE_KINDS}
    for kind, copy in copies.items():
        shutil.copytree(step, copy)
        damage(copy / file.relative_to(step), kind)
    for rejections in engine_under_test.run(
        load_and_expect_errors, setup=setup, folders=list(copies.values()), kind="damaged"
    ):
        for kind, (message, before, after) in zip(copies, rejections, strict=True):
            assert file.name in message, f"{kind}: the message does not name the file: {message}"
            assert_same_state(after, before)


def damage(file: Path, damage_kind: str) -> None:
    content = bytearray(file.read_bytes())
    # A single bit, with the size unchanged: only a checksum finds it.
    content[len(content) // 2] ^= 1
    if damage_kind == "removed":
        file.unlink()
    else:
        file.write_bytes(content if damage_kind == "altered" else content[:-1])


def load_and_expect_errors(
    rank: Rank, *, setup: EngineSetup, folders: list[Path], kind: str
) -> list[tuple[str, dict[str, TrainingState], dict[str, TrainingState]]]:
    """Return the error message of each load, and the state before and after it."""
    expected = {
        "damaged": DamagedCheckpointError,
        "incomplete": IncompleteCheckpointError,
        "other_model": CheckpointError,
    }[kind]
    engine = rank.temporary_engine(setup)
    rejections = []
    for folder in folders:
        before = collect_state(engine)
        with pytest.raises(expected) as caught:
            engine.load_checkpoint(str(folder))
        # pytest.raises accepts subclasses, which would hide one kind of damage behind another.
        assert caught.type is expected, f"{folder}: {caught.value}"
        rejections.append((str(caught.value), before, collect_state(engine)))
    return rejections


def test_step_without_manifest_is_rejected(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A step without a manifest raises IncompleteCheckpointError, also by its parent folder.

    The manifest is written last: without it the save did not complete.
    """
    step = Path(
        engine_under_test.run(
            train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1
        )[0]
    )
    (step / "manifest.json").unlink()
    for rejections in engine_under_test.run(
        load_and_expect_errors, setup=setup, folders=[step, tmp_path], kind="incomplete"
    ):
        for _, before, after in rejections:
            assert_same_state(after, before)


def test_checkpoint_of_another_model_is_rejected(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """A checkpoint with other layers or shapes raises CheckpointError; the state is unchanged."""
    folders = [tmp_path / other.name for other in OTHER_SHAPES]
    for other, folder in zip(OTHER_SHAPES, folders, strict=True):
        other_setup = oracle.make_setup(other, optimizer=ADAMW, schedule=COSINE)
        if not all(
            engine_under_test.run(
                save_if_buildable, setup=other_setup, batches=batches[:1], folder=folder, step=1
            )
        ):
            # This layout fixes the number of layers, so one rank writes the checkpoint to reject.
            engine_under_test.run_in(
                default_layout(1),
                train_and_save,
                setup=other_setup,
                batches=batches[:1],
                folder=folder,
                step=1,
            )
    for rejections in engine_under_test.run(
        load_and_expect_errors, setup=setup, folders=folders, kind="other_model"
    ):
        for _, before, after in rejections:
            assert_same_state(after, before)


def save_if_buildable(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path, step: int
) -> bool:
    """Save a checkpoint if this layout can hold the model; return whether it can."""
    try:
        train_and_save(rank, setup=setup, batches=batches, folder=folder, step=step)
    except ConfigError:
        return False
    return True


def test_failed_save_keeps_the_previous_step(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """After a full disk on one rank, all ranks raise and training resumes from the step before."""

    def interrupt() -> None:
        messages = engine_under_test.run(failing_save, setup=setup, folder=tmp_path, step=2)
        assert all("No space left" in message for message in messages)

    check_previous_step_is_kept(
        engine_under_test, setup=setup, batches=batches, folder=tmp_path, interrupt_save=interrupt
    )


def check_previous_step_is_kept(
    engine_under_test: EngineUnderTest,
    *,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    folder: Path,
    interrupt_save: Callable[[], None],
) -> None:
    """Save step 1, interrupt the save of step 2, and check that training resumes from step 1."""
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:1], folder=folder, step=1)
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:2])[0]
    interrupt_save()
    assert list_complete_steps(folder) == [1]
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[1:2], folder=folder
    )[0]
    assert_same_state(resumed[0].state, uninterrupted[1].state)


def act_after_writing(engine: BaseEngine, *, rank: Rank, action: Callable[[], None]) -> None:
    """Let a save of the engine run an action on the last rank once its files are written."""
    write = engine._write_state

    def write_and_act(directory: str) -> list[str]:
        files = write(directory)
        # Use the last rank, because rank 0 must learn about the failure from another rank.
        if rank.index == rank.world_size - 1:
            action()
        return files

    engine._write_state = write_and_act  # type: ignore[method-assign]  # injected failure: the real save runs first


def failing_save(rank: Rank, *, setup: EngineSetup, folder: Path, step: int) -> str:
    """Save with an OSError on the last rank after its files were written; return the message."""

    def fill_disk() -> None:
        raise OSError(28, "No space left on device")

    engine = rank.temporary_engine(setup)
    act_after_writing(engine, rank=rank, action=fill_disk)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(str(folder), global_step=step)
    return str(caught.value)


def test_killed_save_keeps_the_previous_step(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """After a rank is killed during a save, training resumes from the step before."""

    def interrupt() -> None:
        with pytest.raises(RankFailureError, match="died"):
            engine_under_test.run(killed_save, setup=setup, folder=tmp_path, step=2)

    check_previous_step_is_kept(
        engine_under_test, setup=setup, batches=batches, folder=tmp_path, interrupt_save=interrupt
    )


def killed_save(rank: Rank, *, setup: EngineSetup, folder: Path, step: int) -> None:
    """Kill the last rank once its files are written."""
    engine = rank.temporary_engine(setup)
    act_after_writing(engine, rank=rank, action=lambda: os.kill(os.getpid(), signal.SIGKILL))
    engine.save_checkpoint(str(folder), global_step=step)


def test_only_the_newest_steps_are_kept(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    """`max_ckpt_to_keep` deletes the oldest steps."""
    engine_under_test.run(save_often, setup=setup, folder=tmp_path, num_saves=4, max_to_keep=2)
    assert list_complete_steps(tmp_path) == [3, 4]


def save_often(
    rank: Rank, *, setup: EngineSetup, folder: Path, num_saves: int, max_to_keep: int
) -> None:
    """Save steps 1 to num_saves."""
    engine = rank.temporary_engine(setup)
    for step in range(1, num_saves + 1):
        engine.save_checkpoint(str(folder), global_step=step, max_ckpt_to_keep=max_to_keep)


def test_only_the_downloaded_copy_is_deleted(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    """`del_local_after_load` deletes the downloaded step and no other file."""
    local, remote, downloads = tmp_path / "local", tmp_path / "remote", tmp_path / "downloads"
    downloads.mkdir()
    # A file that Temper did not write must survive the deletion.
    (downloads / "notes.txt").write_text("a file of the user")
    states = engine_under_test.run(
        save_and_load_remotely,
        setup=setup,
        batches=batches[:1],
        local=local,
        url=f"file://{remote}",
        downloads=downloads,
    )
    assert_same_state(states[0][1], states[0][0])
    assert [path.name for path in downloads.iterdir()] == ["notes.txt"]
    assert (list_complete_steps(local), list_complete_steps(remote)) == ([1], [1])


def save_and_load_remotely(
    rank: Rank,
    *,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    local: Path,
    url: str,
    downloads: Path,
) -> tuple[dict[str, TrainingState], dict[str, TrainingState]]:
    """Return the state when saved, and when loaded from the remote copy."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    saved = collect_state(engine)
    engine.save_checkpoint(str(local), url, global_step=1)
    # Change the state after the save, so that a load without effect is noticed.
    train(engine, batches)
    engine.load_checkpoint(str(downloads), url, del_local_after_load=True)
    return saved, collect_state(engine)
