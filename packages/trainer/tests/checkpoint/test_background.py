"""Saves that are written while a run goes on: when they are committed, and what is left where one fails."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport, last_complete_step, report_part
from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError
from temper_trainer.checkpoint.background import Saves
from temper_trainer.checkpoint.save import Checkpointer
from temper_trainer.checkpoint.state import TrainerState
from temper_trainer.config.run import RunConfig
from temper_trainer.types import DataCursor


class SlowRole:
    """A role that has written when the test says so."""

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


def state(step: int) -> TrainerState:
    return TrainerState(
        phase="rl", step=step, cursor=DataCursor(), weight_version=1, config_digest="ab"
    )


def saves(
    root: Path, role: SlowRole, *, in_background: bool = True, max_to_keep: int | None = None
) -> Saves:
    return Saves(
        Checkpointer(root=root, max_to_keep=max_to_keep),
        roles={"actor": role},
        in_background=in_background,
    )


def ends_with(error: BaseException, ours: Saves) -> None:
    """A run that is in the middle of a save when this happens."""
    with ours:
        ours.save(state(1), waits=False)
        raise error


def test_a_save_becomes_a_step_once_every_role_has_written_it(tmp_path: Path) -> None:
    role = SlowRole()
    with saves(tmp_path, role) as ours:
        goal = ours.save(state(1), waits=False)
        ours.settle()
        assert last_complete_step(tmp_path) is None
        role.is_written = True
        ours.settle()
        assert last_complete_step(tmp_path) == 1
        assert (goal / "actor" / "weights").is_file()


def test_the_next_save_and_the_end_wait_for_the_one_before(tmp_path: Path) -> None:
    with saves(tmp_path, SlowRole()) as ours:
        ours.save(state(1), waits=False)
        ours.save(state(2), waits=False)
        assert last_complete_step(tmp_path) == 1
    assert last_complete_step(tmp_path) == 2


def test_a_save_that_waits_is_there_when_it_returns(tmp_path: Path) -> None:
    with saves(tmp_path, SlowRole(), max_to_keep=1) as ours:
        ours.save(state(1), waits=False)
        assert ours.save(state(2), waits=True).is_dir()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_a_failed_save_is_told_at_the_next_step_and_leaves_the_earlier_ones(tmp_path: Path) -> None:
    role = SlowRole()
    with saves(tmp_path, role) as ours:
        ours.save(state(1), waits=True)
        ours.save(state(2), waits=False)
        role.is_written = role.fails = True
        with pytest.raises(
            CheckpointError,
            match=r"step 2 could not be saved: no space left.*earlier steps are untouched",
        ):
            ours.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_run_that_fails_keeps_the_save_that_was_under_way(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward"):
        ends_with(ValueError("reward"), saves(tmp_path, SlowRole()))
    assert last_complete_step(tmp_path) == 1


def test_a_run_that_is_told_to_stop_at_once_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ends_with(KeyboardInterrupt(), saves(tmp_path, SlowRole()))
    assert last_complete_step(tmp_path) is None


def test_an_engine_that_cannot_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="does not offer 'background_save'"):
        saves(tmp_path, SlowRole(offers=False))
    assert (
        not saves(tmp_path, SlowRole(offers=False), in_background=False)
        .save(state(1), waits=False)
        .name.startswith(".")
    )


def test_it_is_refused_where_only_the_last_save_would_be() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.save_in_background is on, but run\.save_every is 0"
    ):
        RunConfig(save_in_background=True, save_interval_s=None)
