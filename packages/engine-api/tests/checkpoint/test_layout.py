"""What is on the disk decides: which steps are whole, which may go."""

from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.checkpoint import begin, complete_steps, find_step, last_complete_step, prune, verify
from temper_engine_api.checkpoint.layout import leftovers, partial_directory
from temper_engine_api.errors import ConfigError, IncompleteCheckpointError

SaveStep = Callable[..., Path]


def test_complete_steps_are_those_with_a_manifest(save_step: SaveStep, tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "nowhere") == []
    assert last_complete_step(tmp_path) is None
    for step in (20, 3, 100_000_000):
        save_step(step)
    (tmp_path / "step_00000050").mkdir()
    (tmp_path / "step_7").mkdir()
    begin(tmp_path, 60)
    assert complete_steps(tmp_path) == [3, 20, 100_000_000]
    assert last_complete_step(tmp_path) == 100_000_000


def test_a_path_means_its_step_or_the_last_complete_one(save_step: SaveStep, tmp_path: Path) -> None:
    first, second = save_step(1), save_step(2)
    (tmp_path / "step_00000003").mkdir()
    assert find_step(tmp_path) == second
    assert find_step(first) == first


def test_a_path_without_a_complete_step_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"does not exist"):
        find_step(tmp_path / "nowhere")
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(IncompleteCheckpointError, match=r"holds no complete step .* it holds \['step_00000003'\]"):
        find_step(tmp_path)
    with pytest.raises(IncompleteCheckpointError, match=r"it holds nothing"):
        find_step(tmp_path / "step_00000003")


def test_pruning_keeps_the_newest(save_step: SaveStep, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(step)
    assert prune(tmp_path, max_to_keep=2) == [1, 2]
    assert complete_steps(tmp_path) == [3, 4]
    assert prune(tmp_path, max_to_keep=9) == []
    for step in (3, 4):
        verify(tmp_path / f"step_0000000{step}")


def test_a_newer_damaged_manifest_does_not_count_as_the_last_complete_step(save_step: SaveStep, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(step)
    (tmp_path / "step_00000003" / "manifest.json").write_text("{")
    assert prune(tmp_path, max_to_keep=1) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_pruning_never_removes_what_we_did_not_write(save_step: SaveStep, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        save_step(step)
    (tmp_path / "step_00000001" / "engine" / "notes.txt").write_text("the good one")
    for name in ("step_00000000", "best", ".step_00000009.abc.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    assert prune(tmp_path, max_to_keep=1) == [2]
    assert "engine/notes.txt is not ours to delete" in caplog.text
    verify(tmp_path / "step_00000001")
    assert all((tmp_path / name / "mine").is_file() for name in ("step_00000000", "best", ".step_00000009.abc.partial"))


def test_pruning_removes_what_died_before_its_commit(save_step: SaveStep, tmp_path: Path) -> None:
    save_step(1)
    dead = begin(tmp_path, 2)
    assert leftovers(tmp_path) == [dead.staging]
    prune(tmp_path, max_to_keep=1)
    assert leftovers(tmp_path) == []
    assert complete_steps(tmp_path) == [1]


@pytest.mark.parametrize("number", [0, -1])
def test_keeping_none_is_refused(save_step: SaveStep, tmp_path: Path, number: int) -> None:
    save_step(1)
    with pytest.raises(ConfigError, match=r"at least 1 is kept"):
        prune(tmp_path, max_to_keep=number)
    assert complete_steps(tmp_path) == [1]


def test_partial_names_do_not_collide(tmp_path: Path) -> None:
    assert partial_directory(tmp_path, 1) != partial_directory(tmp_path, 1)


@pytest.mark.parametrize("use", [find_step, lambda url: begin(url, 1)], ids=["load", "save"])
def test_a_url_is_no_folder_of_this_name(use: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"s3://bucket/run is a URL, but a folder .* the URL as hdfs_path"):
        use("s3://bucket/run")
    assert not list(tmp_path.iterdir())
