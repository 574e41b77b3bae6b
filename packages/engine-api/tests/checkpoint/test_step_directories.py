"""Test which directories count as complete steps, and which ones retention deletes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from temper_engine_api.checkpoint import (
    begin_checkpoint,
    delete_killed_saves,
    delete_old_damaged_steps,
    find_latest_step,
    find_step,
    list_complete_steps,
    list_partial_saves,
    lock_for_reading,
    prune,
    set_aside,
    verify,
)
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.checkpoint.step_directories import make_partial_path, remove_step
from temper_engine_api.errors import ConfigError, IncompleteCheckpointError

SaveStep = Callable[..., Path]


def test_complete_steps_are_those_with_a_manifest(save_step: SaveStep, tmp_path: Path) -> None:
    assert list_complete_steps(tmp_path / "nowhere") == []
    assert find_latest_step(tmp_path) is None
    for step in (20, 3, 100_000_000):
        save_step(step)
    (tmp_path / "step_00000050").mkdir()
    (tmp_path / "step_7").mkdir()
    begin_checkpoint(tmp_path, 60)
    assert list_complete_steps(tmp_path) == [3, 20, 100_000_000]
    assert find_latest_step(tmp_path) == 100_000_000


def test_path_gives_its_step_or_the_last_complete_one(save_step: SaveStep, tmp_path: Path) -> None:
    first, second = save_step(1), save_step(2)
    (tmp_path / "step_00000003").mkdir()
    assert find_step(tmp_path) == second
    assert find_step(first) == first


def test_error_without_a_complete_step_lists_the_entries(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"does not exist"):
        find_step(tmp_path / "nowhere")
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(
        IncompleteCheckpointError, match=r"has no complete step.* contains \['step_00000003'\]"
    ):
        find_step(tmp_path)
    with pytest.raises(IncompleteCheckpointError, match=r"it contains nothing"):
        find_step(tmp_path / "step_00000003")


@pytest.mark.parametrize(
    "inside",
    [
        "global_step_100",
        "latest_checkpointed_iteration.txt",
        "actor/global_step_100",
        "model_world_size_2_rank_0.pt",
        "actor/model_world_size_2_rank_0.pt",
        "adapter_checkpoint",
        "model/mp_rank_00",
        "model/dist_ckpt",
        "actor/dist_ckpt",
        "actor/model/dist_ckpt",
    ],
)
def test_checkpoint_of_another_system_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, inside: str
) -> None:
    folder = tmp_path / "an old run"
    (folder / inside).mkdir(parents=True)
    message = rf"contains {inside}, .*`temper-migrate checkpoint '{folder}' --to temper --out NEW`"
    with pytest.raises(IncompleteCheckpointError, match=message):
        find_step(folder)
    with pytest.raises(IncompleteCheckpointError, match=message):
        read_manifest(folder)


def test_pruning_keeps_the_newest(save_step: SaveStep, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(step)
    assert prune(tmp_path, max_to_keep=2) == [1, 2]
    assert list_complete_steps(tmp_path) == [3, 4]
    assert prune(tmp_path, max_to_keep=9) == []
    for step in (3, 4):
        verify(tmp_path / f"step_0000000{step}")


def test_a_newer_damaged_manifest_does_not_count_as_the_last_complete_step(
    save_step: SaveStep, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save_step(step)
    (tmp_path / "step_00000003" / "manifest.json").write_text("{")
    assert prune(tmp_path, max_to_keep=1) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_pruning_keeps_files_of_other_programs(
    save_step: SaveStep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save_step(step)
    (tmp_path / "step_00000001" / "engine" / "notes.txt").write_text("the good one")
    for name in ("step_00000000", "best", ".step_00000009.abc.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    assert prune(tmp_path, max_to_keep=1) == [2]
    assert "engine/notes.txt is not a file of this step" in caplog.text
    verify(tmp_path / "step_00000001")
    assert all(
        (tmp_path / name / "mine").is_file()
        for name in ("step_00000000", "best", ".step_00000009.abc.partial")
    )


def test_pruning_deletes_uncommitted_saves(save_step: SaveStep, tmp_path: Path) -> None:
    save_step(1)
    dead = begin_checkpoint(tmp_path, 2)
    assert list_partial_saves(tmp_path) == [dead.staging]
    prune(tmp_path, max_to_keep=1)
    assert list_partial_saves(tmp_path) == []
    assert list_complete_steps(tmp_path) == [1]


def test_pruning_deletes_only_steps_of_the_same_run(save_step: SaveStep, tmp_path: Path) -> None:
    for step, run_id in ((1, None), (2, "other"), (3, "this_run"), (4, "this_run"), (5, "other")):
        save_step(step, run_id=run_id)
    left = {
        run_id: begin_checkpoint(tmp_path, 9, run_id=run_id).staging
        for run_id in (None, "other", "this_run")
    }
    assert prune(tmp_path, max_to_keep=1, run_id="this_run") == [3]
    assert list_complete_steps(tmp_path) == [1, 2, 4, 5]
    assert set(list_partial_saves(tmp_path)) == {left[None], left["other"]}


def write_half_a_step(root: Path, step: int) -> Path:
    """Create the directory of a save that was killed."""
    staging = begin_checkpoint(root, step, run_id="this_run").staging
    (staging / "engine").mkdir()
    (staging / "engine" / "0.bin").write_text("half")
    return staging


def test_files_of_a_killed_save_are_deleted_once_its_run_has_listed_them(
    save_step: SaveStep, tmp_path: Path
) -> None:
    save_step(1, run_id="this_run")
    left = write_half_a_step(tmp_path, 2)
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert (left / "engine" / "0.bin").is_file()
    renamed = set_aside(left, "incomplete")
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert not renamed.exists()


@pytest.mark.parametrize("name", ["notes.txt", "engine/notes.txt", "engine/0.bin", "folder/link"])
def test_pruning_keeps_a_killed_save_to_which_a_file_was_added(
    save_step: SaveStep, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_step(1, run_id="this_run")
    renamed = set_aside(write_half_a_step(tmp_path, 2), "incomplete")
    added = renamed / name
    if name == "folder/link":
        added.parent.mkdir()
        added.symlink_to(tmp_path)  # a link to a directory is a file of somebody else, too
    else:
        added.write_text("mine, not the run's")
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert added.exists()
    assert (renamed / "engine" / "0.bin").is_file()
    assert f"{renamed} is kept: {name} is not known to be a file of this run" in caplog.text


@pytest.mark.parametrize("reason", ["incomplete", "damaged"])
def test_a_file_in_place_of_a_step_does_not_end_retention(
    save_step: SaveStep, tmp_path: Path, reason: Literal["incomplete", "damaged"]
) -> None:
    (tmp_path / "step_00000004").write_text("a file")
    renamed = set_aside(tmp_path / "step_00000004", reason)
    for step in (1, 2, 3):
        save_step(step, run_id="this_run")
    delete_killed_saves(tmp_path, run_id="this_run")
    assert prune(tmp_path, max_to_keep=2, run_id="this_run") == [1]
    delete_old_damaged_steps(tmp_path, run_id="this_run")
    assert renamed.read_text() == "a file"


def test_a_step_of_which_half_was_deleted_is_deleted_later_unless_a_file_was_added(
    save_step: SaveStep, tmp_path: Path
) -> None:
    save_step(3, run_id="this_run")
    halves = []
    for step in (1, 2):
        (save_step(step, run_id="this_run") / ".temper-partial").write_text("this_run")
        halves.append(tmp_path / f".step_0000000{step}.abc.partial")
        (tmp_path / f"step_0000000{step}").rename(halves[-1])
        (halves[-1] / "engine" / "shards" / "0.bin").unlink()
    (halves[0] / "trainer" / "notes.txt").write_text("mine")
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert [half.exists() for half in halves] == [True, False]
    assert (halves[0] / "trainer" / "notes.txt").is_file()


@pytest.mark.parametrize("num_deleted", range(5))
def test_a_deletion_that_is_killed_at_any_file_is_finished_by_the_next_one(
    save_step: SaveStep, tmp_path: Path, num_deleted: int
) -> None:
    for step in (1, 2):
        save_step(step, run_id="this_run")
    ended = subprocess.run(
        [sys.executable, "-c", DIES_WHILE_PRUNING, str(tmp_path), str(num_deleted)], check=False
    )
    assert ended.returncode == 9
    assert list_partial_saves(tmp_path) != []
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


DIES_WHILE_PRUNING = """
import os, sys
from pathlib import Path
from temper_engine_api.checkpoint import prune
left = int(sys.argv[2])
def dying(remove):
    def counting(path, *arguments, **keywords):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return remove(path, *arguments, **keywords)
    return counting
for name in ("unlink", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
    setattr(Path, name, dying(getattr(Path, name)))
prune(sys.argv[1], max_to_keep=1, run_id="this_run")
"""


def test_permanent_steps_are_kept_beyond_the_newest(save_step: SaveStep, tmp_path: Path) -> None:
    for step in range(1, 8):
        save_step(step)
    assert prune(tmp_path, max_to_keep=2, keep_every=3) == [1, 2, 4, 5]
    assert list_complete_steps(tmp_path) == [3, 6, 7]


def test_a_damaged_step_does_not_count_among_those_to_keep(
    save_step: SaveStep, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        save_step(step)
    (tmp_path / "step_00000004" / "trainer" / "state.json").unlink()
    assert prune(tmp_path, max_to_keep=2) == [1]
    assert list_complete_steps(tmp_path) == [2, 3, 4]


READER = """
import sys
from temper_engine_api.checkpoint import lock_for_reading
with lock_for_reading(sys.argv[1]):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_a_step_that_another_process_reads_is_kept_until_it_is_done(
    save_step: SaveStep, tmp_path: Path
) -> None:
    first = save_step(1)
    save_step(2)
    command = [sys.executable, "-c", READER, str(first)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert prune(tmp_path, max_to_keep=1) == []
        verify(first)
        reader.communicate()
    assert prune(tmp_path, max_to_keep=1) == [1]


def test_a_download_is_deleted_while_another_rank_still_holds_its_lock(
    save_step: SaveStep, tmp_path: Path
) -> None:
    first = save_step(1)
    with lock_for_reading(first):
        assert not remove_step(first, read_manifest(first))
        assert remove_step(first, read_manifest(first), is_read=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step_00000001", "step_00000001.incomplete-1"])
def test_retention_neither_deletes_nor_renames_a_symbolic_link(
    save_step: SaveStep, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO")
    archived = tmp_path / "archive" / "step_00000001"
    archived.parent.mkdir()
    save_step(1).rename(archived)
    if name != archived.name:
        (archived / ".temper-partial").touch()
    link = tmp_path / name
    link.symlink_to(archived)
    save_step(2)
    assert prune(tmp_path, max_to_keep=1) == []
    assert link.readlink() == archived
    verify(archived)
    if name == archived.name:
        assert f"{link} is kept: it is a symbolic link" in caplog.messages


def test_a_step_that_was_deleted_cannot_be_read(save_step: SaveStep, tmp_path: Path) -> None:
    first = save_step(1)
    save_step(2)
    prune(tmp_path, max_to_keep=1)
    with (
        pytest.raises(IncompleteCheckpointError, match=r"step_00000001 has no manifest\.json"),
        lock_for_reading(first),
    ):
        pass


def test_set_aside_never_replaces_an_earlier_directory(save_step: SaveStep, tmp_path: Path) -> None:
    names = [set_aside(save_step(7), "damaged").name for _ in range(2)]
    assert names == ["step_00000007.damaged-1", "step_00000007.damaged-2"]
    partial = begin_checkpoint(tmp_path, 8, run_id="this_run")
    assert set_aside(partial.staging, "incomplete").name == "step_00000008.incomplete-1"
    assert list_complete_steps(tmp_path) == []
    save_step(9, run_id="this_run")
    prune(tmp_path, max_to_keep=1, run_id="this_run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "step_00000009"]


@pytest.mark.parametrize("number", [0, -1])
def test_keeping_none_is_refused(save_step: SaveStep, tmp_path: Path, number: int) -> None:
    save_step(1)
    with pytest.raises(ConfigError, match=r"but must be at least 1"):
        prune(tmp_path, max_to_keep=number)
    assert list_complete_steps(tmp_path) == [1]


def test_partial_names_do_not_collide(tmp_path: Path) -> None:
    assert make_partial_path(tmp_path, 1) != make_partial_path(tmp_path, 1)


@pytest.mark.parametrize(
    "use", [find_step, lambda url: begin_checkpoint(url, 1)], ids=["load", "save"]
)
def test_url_is_refused_as_a_local_folder(
    use: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"s3://bucket/run is a URL, but must be a local folder: .* the URL as hdfs_path",
    ):
        use("s3://bucket/run")
    assert not list(tmp_path.iterdir())
