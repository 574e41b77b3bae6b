"""Test when checkpoints written in the background are committed, and what a failed one leaves."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport, find_latest_step, report_part
from temper_engine_api.errors import CapabilityError, CheckpointError
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.types import DataCursor


class SlowRole:
    """A role that finishes writing when the test sets ``is_written``."""

    dp_size = 1

    def __init__(self, *, offers: bool = True) -> None:
        self._offers = offers
        self._directory = Path()
        self.is_written = False
        self.fails = False

    def require(self, capability: Capability) -> None:
        if not self._offers:
            raise CapabilityError(f"SlowRole does not offer {capability.value!r}.")

    def write_part(self, directory: str) -> Sequence[PartReport]:
        self.stage_part(directory)
        return self.finish_part()

    def stage_part(self, directory: str) -> None:
        self._directory, self.is_written = Path(directory), False

    def has_written_part(self) -> bool:
        return self.is_written

    def finish_part(self) -> Sequence[PartReport]:
        if self.fails:
            raise OSError("no space left")
        (self._directory / "weights").write_text("w")
        return [report_part(str(self._directory), ["weights"])]


def make_state(step: int) -> TrainerState:
    return TrainerState(
        phase="rl", step=step, cursor=DataCursor(), weight_version=1, config_digest="ab"
    )


def open_writer(
    root: Path, role: SlowRole, *, in_background: bool = True, max_to_keep: int | None = None
) -> CheckpointWriter:
    return CheckpointWriter(
        Checkpointer(root=root, max_to_keep=max_to_keep),
        roles={"actor": role},
        in_background=in_background,
    )


def fail_during_save(error: BaseException, writer: CheckpointWriter) -> None:
    """Raise the error while a save is in progress."""
    with writer:
        writer.save(make_state(1), wait=False)
        raise error


def test_save_is_committed_once_every_role_has_written_it(tmp_path: Path) -> None:
    role = SlowRole()
    with open_writer(tmp_path, role) as writer:
        goal = writer.save(make_state(1), wait=False)
        writer.commit_before_log(is_save_due=False)
        assert find_latest_step(tmp_path) is None
        role.is_written = True
        writer.commit_before_log(is_save_due=False)
        assert find_latest_step(tmp_path) == 1
        assert (goal / "actor" / "weights").is_file()


def test_save_in_progress_is_committed_before_the_log_if_the_next_one_is_due(
    tmp_path: Path,
) -> None:
    with open_writer(tmp_path, SlowRole()) as writer:
        writer.save(make_state(1), wait=False)
        writer.commit_before_log(is_save_due=True)
        assert find_latest_step(tmp_path) == 1


def test_next_save_and_end_wait_for_the_previous_save(tmp_path: Path) -> None:
    with open_writer(tmp_path, SlowRole()) as writer:
        writer.save(make_state(1), wait=False)
        writer.save(make_state(2), wait=False)
        assert find_latest_step(tmp_path) == 1
    assert find_latest_step(tmp_path) == 2


def test_waiting_save_is_committed_when_it_returns(tmp_path: Path) -> None:
    with open_writer(tmp_path, SlowRole(), max_to_keep=1) as writer:
        writer.save(make_state(1), wait=False)
        assert writer.save(make_state(2), wait=True).is_dir()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_failed_save_raises_after_the_next_step_and_leaves_earlier_ones(tmp_path: Path) -> None:
    role = SlowRole()
    with open_writer(tmp_path, role) as writer:
        writer.save(make_state(1), wait=True)
        writer.save(make_state(2), wait=False)
        role.is_written = role.fails = True
        with pytest.raises(
            CheckpointError,
            match=r"step 2 could not be saved: no space left.*Earlier steps have not changed",
        ):
            writer.commit_before_log(is_save_due=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_failing_run_completes_the_save_in_progress(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward"):
        fail_during_save(ValueError("reward"), open_writer(tmp_path, SlowRole()))
    assert find_latest_step(tmp_path) == 1


def test_keyboard_interrupt_does_not_wait_for_the_save_in_progress(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_during_save(KeyboardInterrupt(), open_writer(tmp_path, SlowRole()))
    assert find_latest_step(tmp_path) is None


def test_engine_without_background_saves_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="does not offer 'background_save'"):
        open_writer(tmp_path, SlowRole(offers=False))
    assert (
        not open_writer(tmp_path, SlowRole(offers=False), in_background=False)
        .save(make_state(1), wait=False)
        .name.startswith(".")
    )
