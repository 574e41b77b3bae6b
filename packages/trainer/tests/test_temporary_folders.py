"""Leftovers of dead processes in shared memory and temporary folders, and their removal."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from packages.trainer.tests.loops.byte_tokenizer_for_tests import make_tokenizer
from temper_engine_api.errors import ConfigError
from temper_engine_api.process_folders import make_folder_path, remove_orphans
from temper_engine_api.settings_check import find_write_error
from temper_trainer.config_loading import load
from temper_trainer.rollout.vllm.server_spec import build_server_spec
from temper_trainer.run_lock import RunLock, find_lock_refusal
from temper_trainer.temporary_folders import (
    announce_session,
    claim_folder,
    make_ray_root,
    remove_claimed_folders,
    remove_leftovers,
)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who can make another user's folder")
def test_folder_of_another_user_under_our_name_is_not_removed(tmp_path: Path) -> None:
    parts = make_folder_path("session", root=tmp_path).name.split("-")
    parts[4] = str(int(parts[4]) - 1)
    foreign, claimed = tmp_path / "-".join(parts), tmp_path / "claimed"
    for folder in (foreign, claimed):
        folder.mkdir()
    (claimed / ".temper-owner").write_text(foreign.name)
    for folder in (foreign, claimed):
        os.chown(folder, 65534, 65534)
    assert remove_orphans(tmp_path) == []
    assert remove_claimed_folders(tmp_path) == []
    assert foreign.is_dir()
    assert claimed.is_dir()


def test_each_folder_outside_of_the_run_folder_names_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    make_folder = os.mkdir

    def record(path: str | Path, *arguments: int) -> None:
        names.append(Path(path).name)
        make_folder(path, *arguments)

    monkeypatch.setattr(os, "mkdir", record)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = load(["experiment=quickstart", "rollout=vllm", f"run.dir={tmp_path / 'run'}"]).config
    with RunLock(tmp_path / "run"):
        assert find_lock_refusal(tmp_path / "run") is not None
    assert find_write_error(tmp_path / "other" / "run") is None
    spec = build_server_spec(config, tokenizer=make_tokenizer())
    assert spec.files.keys() >= {"config.json", "tokenizer.json"}
    others = [name for name in names if name != "run"]
    assert {name.lstrip(".").split("-")[1] for name in others} == {"lock", "check", "config"}
    assert all(f"-{os.getpid()}-" in name for name in others)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folder_of_a_killed_check_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".temper-check-1-0a").mkdir()
    assert find_write_error(tmp_path / "run") is None
    assert list(tmp_path.iterdir()) == []


def test_disk_that_takes_a_folder_but_no_file_cannot_be_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # a full disk would need root
    try:
        error = find_write_error(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error is not None
    assert error.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


CLAIM = """
import sys
from pathlib import Path
from temper_trainer.temporary_folders import claim_folder
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
claim_folder(folder)
"""


def make_dead_claim(folder: Path) -> Path:
    """Make a folder that a process that has ended had claimed, and return its claim."""
    subprocess.run([sys.executable, "-c", CLAIM, str(folder)], check=True)
    return folder / ".temper-owner"


def test_folder_that_a_dead_process_claimed_is_removed(tmp_path: Path) -> None:
    make_dead_claim(tmp_path / "session")
    assert remove_claimed_folders(tmp_path) == [tmp_path / "session"]
    assert list(tmp_path.iterdir()) == []


def test_claim_that_is_a_pipe_a_link_or_a_folder_is_ignored(tmp_path: Path) -> None:
    claims = [make_dead_claim(tmp_path / name) for name in ("pipe", "link", "folder")]
    for claim in claims:
        claim.rename(claim.with_name("moved"))
    os.mkfifo(claims[0])
    claims[1].symlink_to("moved")
    claims[2].mkdir()
    assert remove_claimed_folders(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who can make another user's file")
def test_claim_of_another_user_is_ignored(tmp_path: Path) -> None:
    os.chown(make_dead_claim(tmp_path / "session"), 65534, 65534)
    assert remove_claimed_folders(tmp_path) == []


def test_claim_that_was_moved_from_another_folder_is_ignored(tmp_path: Path) -> None:
    live, dead = tmp_path / "live", tmp_path / "dead"
    live.mkdir()
    claim_folder(live)
    make_dead_claim(dead).replace(live / ".temper-owner")
    dead.rmdir()
    live.rename(dead)
    assert remove_claimed_folders(tmp_path) == []


def test_each_start_removes_ray_sessions_of_dead_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    session = make_ray_root() / "session"
    make_dead_claim(session)
    assert session in remove_leftovers()
    assert not session.exists()


def test_only_this_user_can_enter_the_folder_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    root = make_ray_root()
    root.chmod(0o777)  # as Ray does
    root.parent.chmod(0o777)
    assert make_ray_root() == root
    assert root.parent.stat().st_mode & 0o777 == 0o700
    root.rmdir()
    root.parent.rmdir()
    root.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder of this user"):
        make_ray_root()


ANNOUNCE = """
import os, sys, time
from datetime import datetime
from pathlib import Path
from temper_trainer.temporary_folders import announce_session
root = Path(sys.argv[1])
with announce_session(root):
    name = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    (root / name / "logs").mkdir(parents=True)
    (root / f"session_2020-01-01_00-00-00_000000_{os.getpid()}").mkdir()
    print(name, flush=True)
    sys.stdin.read()
"""


def test_ray_session_of_a_process_killed_during_its_start_is_removed(
    tmp_path: Path,
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert remove_claimed_folders(tmp_path) == []
        owner.kill()
    assert remove_claimed_folders(tmp_path) == [tmp_path / name]
    earlier = [f"session_2020-01-01_00-00-00_000000_{owner.pid}"]
    assert [path.name for path in tmp_path.iterdir()] == earlier, (
        "a session of an earlier process with this id is another's"
    )


def test_completed_start_of_ray_leaves_no_announcement(tmp_path: Path) -> None:
    with announce_session(tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
