"""Test that a step is committed atomically and never replaces another."""

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.checkpoint import (
    ManifestInfo,
    begin_checkpoint,
    find_latest_step,
    list_complete_steps,
    report_part,
    set_aside,
    verify,
)
from temper_engine_api.checkpoint.step_directories import list_partial_saves
from temper_engine_api.errors import CheckpointError, ConfigError

SaveStep = Callable[..., Path]


def test_a_committed_step_holds_its_parts_and_verifies(save_step: SaveStep, tmp_path: Path) -> None:
    final = save_step(10)
    assert final == tmp_path / "step_00000010"
    manifest = verify(final)
    assert [record.path for record in manifest.files] == [
        "engine/shards/0.bin",
        "trainer/state.json",
    ]
    assert (manifest.step, manifest.info.config_hash, manifest.num_bytes) == (
        10,
        "c0ffee",
        len("weights of step 10") + 2,
    )
    assert sorted(path.name for path in final.iterdir()) == ["engine", "manifest.json", "trainer"]
    assert list_partial_saves(tmp_path) == []


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    transaction = begin_checkpoint(tmp_path, 3)
    (transaction.open_part("engine") / "a").write_text("a")
    assert list_complete_steps(tmp_path) == []
    assert not transaction.final.exists()


def test_leaving_uncommitted_removes_the_staging_directory_only(
    save_step: SaveStep, tmp_path: Path
) -> None:
    save_step(1)

    def die_while_saving() -> None:
        with begin_checkpoint(tmp_path, 2) as transaction:
            (transaction.open_part("engine") / "a").write_text("a")
            raise KeyError

    with pytest.raises(KeyError):
        die_while_saving()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_an_existing_step_is_never_overwritten(save_step: SaveStep, tmp_path: Path) -> None:
    save_step(10)
    with pytest.raises(
        CheckpointError, match=r"step_00000010 already exists and is never overwritten"
    ):
        begin_checkpoint(tmp_path, 10)
    verify(tmp_path / "step_00000010")


def test_steps_can_be_saved_at_the_same_time(tmp_path: Path, info: ManifestInfo) -> None:
    one, two = begin_checkpoint(tmp_path, 1), begin_checkpoint(tmp_path, 2)
    for transaction in (two, one):
        (transaction.open_part("engine") / "a").write_text(str(transaction.step))
    for transaction in (two, one):
        transaction.commit(
            {"engine": [report_part(transaction.open_part("engine"), ["a"])]}, info=info
        )
    assert list_complete_steps(tmp_path) == [1, 2]
    assert [(tmp_path / f"step_0000000{step}/engine/a").read_text() for step in (1, 2)] == [
        "1",
        "2",
    ]


def test_first_commit_of_a_step_wins(tmp_path: Path, info: ManifestInfo) -> None:
    one, two = begin_checkpoint(tmp_path, 1), begin_checkpoint(tmp_path, 1)
    for content, transaction in (("first", one), ("second", two)):
        (transaction.open_part("engine") / "a").write_text(content)
    final = one.commit({"engine": [report_part(one.open_part("engine"), ["a"])]}, info=info)
    with pytest.raises(CheckpointError, match=r"was committed by another run meanwhile"):
        two.commit({"engine": [report_part(two.open_part("engine"), ["a"])]}, info=info)
    verify(final)
    assert (final / "engine" / "a").read_text() == "first"


def save_after(damage: Callable[[Path], object], root: Path, info: ManifestInfo) -> None:
    """Commit a step whose part was damaged after its report."""
    with begin_checkpoint(root, 1) as transaction:
        part = transaction.open_part("engine")
        (part / "a").write_text("aaaa")
        report = report_part(part, ["a"])
        damage(part)
        transaction.commit({"engine": [report]}, info=info)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda part: (part / "a").unlink(), r"engine/a is missing, so step 1 is not committed"),
        (
            lambda part: (part / "a").write_text("b"),
            r"engine/a has 1 bytes instead of 4, so step 1 is not committed",
        ),
        (
            lambda part: (part / "b").write_text("b"),
            r"no participant reported engine/b, so step 1 is not committed",
        ),
    ],
    ids=["vanished", "shrank", "nobody's"],
)
def test_commit_fails_if_a_file_differs_from_its_report(
    tmp_path: Path, info: ManifestInfo, damage: Callable[[Path], object], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        save_after(damage, tmp_path, info)
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_may_report_the_same_file_but_not_different_content(
    tmp_path: Path, info: ManifestInfo
) -> None:
    transaction = begin_checkpoint(tmp_path, 1)
    part = transaction.open_part("engine")
    (part / "a").write_text("one")
    early = report_part(part, ["a"])
    (part / "a").write_text("two")
    late = report_part(part, ["a"])
    with pytest.raises(CheckpointError, match=r"two ranks wrote engine/a with different content"):
        transaction.commit({"engine": [early, late]}, info=info)
    transaction.commit({"engine": [late, late]}, info=info)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step is -1"):
        begin_checkpoint(tmp_path, -1)


def test_a_full_disk_is_reported_with_the_damaged_checkpoints_that_take_space(
    save_step: SaveStep, small_disk: Path
) -> None:
    set_aside(save_step(1, content="w" * 100_000, root=small_disk), "damaged")
    with (
        pytest.raises(CheckpointError, match=r"; 1 damaged checkpoint takes 0\.1 MiB \(delete"),
        begin_checkpoint(small_disk, 2) as transaction,
    ):
        (transaction.open_part("engine") / "big.bin").write_bytes(b"x" * 300_000)


def test_reason_that_ends_with_a_full_stop_is_followed_by_the_disk_usage(tmp_path: Path) -> None:
    with begin_checkpoint(tmp_path, 2) as transaction:
        message = str(transaction.make_error("the engine failed: free disk space."))
        transaction.abort()
    assert "the engine failed: free disk space. 0.0 MiB of the step were written and " in message


def test_a_full_disk_leaves_the_earlier_step_and_says_how_much_was_needed(
    save_step: SaveStep, small_disk: Path, info: ManifestInfo
) -> None:
    save_step(1, content="w" * 100_000, root=small_disk)
    sentence = (
        r"step 2 could not be saved: .*No space left.* MiB of the step were written and 0.0 MiB "
        r"are free .*step 1 takes 0.1 MiB"
    )
    with (
        pytest.raises(CheckpointError, match=sentence) as caught,
        begin_checkpoint(small_disk, 2) as transaction,
    ):
        (transaction.open_part("engine") / "big.bin").write_bytes(b"x" * 300_000)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["step_00000001"]
    verify(small_disk / "step_00000001")
    save_step(2, root=small_disk)  # there is room again


def test_a_damaged_earlier_step_does_not_hide_that_the_disk_is_full(
    save_step: SaveStep, small_disk: Path
) -> None:
    (save_step(1, root=small_disk) / "manifest.json").write_text("{")
    with (
        pytest.raises(CheckpointError, match=r"step 2 could not be saved"),
        begin_checkpoint(small_disk, 2) as transaction,
    ):
        (transaction.open_part("engine") / "big.bin").write_bytes(b"x" * 300_000)


LIMITED = """
import resource, sys
from pathlib import Path
from temper_engine_api.checkpoint import begin_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with begin_checkpoint(sys.argv[1], 2) as transaction:
    (transaction.open_part("engine") / "big.bin").write_bytes(b"x" * 100_000)
"""


def test_a_file_that_can_not_grow_is_a_checkpoint_error(
    save_step: SaveStep, tmp_path: Path
) -> None:
    save_step(1)
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "CheckpointError: step 2 could not be saved: [Errno 27]" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


# A run dies at each point of a save of step 2; step 1 is complete.

DIES = """
import os, sys
from pathlib import Path
from temper_engine_api.checkpoint import ManifestInfo, begin_checkpoint, prune, report_part

root, point = sys.argv[1:]

def die(*args, **kwargs):
    os._exit(9)

def reach(name):
    if point == name:
        die()

transaction = begin_checkpoint(root, 2)
reach("begun")
part = transaction.open_part("engine")
(part / "a.bin").write_text("new")
reach("written")
reports = {"engine": [report_part(part, ["a.bin"])]}
reach("reported")
if point == "manifest written under another name":
    os.replace = die
if point == "manifest in place":
    os.rename = die
if point == "renamed":
    Path.unlink = die
transaction.commit(reports, info=ManifestInfo(topology={}, config_hash="", packages={}))
reach("committed")
if point == "pruned step out of sight":
    Path.unlink = die
prune(root, max_to_keep=1)
raise AssertionError("the run should have died")
"""


def die_at(point: str, root: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DIES, str(root), point], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 9, ended.stderr


@pytest.mark.parametrize(
    "point",
    ["begun", "written", "reported", "manifest written under another name", "manifest in place"],
)
def test_earlier_step_is_the_latest_if_the_run_dies_before_the_rename(
    save_step: SaveStep, tmp_path: Path, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_step(1)
    die_at(point, tmp_path)
    assert find_latest_step(tmp_path) == 1
    verify(tmp_path / "step_00000001")
    (left,) = list_partial_saves(tmp_path)
    verify(save_step(2))  # the next run saves the same step
    assert f"{left} was never committed" in caplog.text


@pytest.mark.parametrize("point", ["renamed", "committed", "pruned step out of sight"])
def test_later_step_is_the_latest_if_the_run_dies_after_the_rename(
    save_step: SaveStep, tmp_path: Path, point: str
) -> None:
    save_step(1)
    die_at(point, tmp_path)
    assert find_latest_step(tmp_path) == 2
    assert verify(tmp_path / "step_00000002").step == 2
    for step in list_complete_steps(tmp_path):
        verify(tmp_path / f"step_{step:08d}")
