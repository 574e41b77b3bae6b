"""Folders that name their process, and their removal when that process is dead."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from temper_engine_api.process_folders import (
    SHARED_MEMORY,
    claim_shared_memory,
    make_folder_path,
    make_temporary_folder,
    remove_folder,
    remove_orphans,
)

MAKE = """
import sys
from pathlib import Path
from temper_engine_api.process_folders import make_folder_path
folder = make_folder_path("weights", root=Path(sys.argv[1]))
folder.mkdir()
(folder / "00000").write_bytes(b"weights")
print(folder, flush=True)
sys.stdin.read()
"""
LOCK = """
import os, sys
from pathlib import Path
from temper_engine_api.process_folders import lock_folder, make_folder_path
parts = make_folder_path("weights", root=Path(sys.argv[1])).name.split("-")
folder = Path(sys.argv[1]) / "-".join([*parts[:5], "00000000", parts[6]])
folder.mkdir()
for _ in range(2):
    lock_folder(folder)
print(folder, flush=True)
sys.stdin.read()
"""
"""Makes a folder as a process in another container does, whose process ids mean nothing here."""
CLAIM = """
import os, sys
from pathlib import Path
from temper_engine_api.process_folders import claim_shared_memory, make_folder_path
folder = make_folder_path("server", root=Path(sys.argv[1]))
folder.mkdir(mode=0o700)
claim_shared_memory(folder, [Path(sys.argv[2])])
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def shared_file() -> Iterator[Path]:
    if not SHARED_MEMORY.is_dir():
        pytest.skip("needs /dev/shm: run on Linux")
    path = SHARED_MEMORY / f"psm_{secrets.token_hex(8)}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def start_owner(root: Path, code: str = MAKE) -> tuple["subprocess.Popen[str]", Path]:
    command = [sys.executable, "-c", code, str(root)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_folder_of_a_killed_process_is_removed_by_the_next_process(tmp_path: Path) -> None:
    owner, folder = start_owner(tmp_path)
    with owner:
        assert remove_orphans(tmp_path) == []
        assert (folder / "00000").is_file()
        owner.kill()
    make_folder_path("weights", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_whose_process_id_was_reused_is_removed(tmp_path: Path) -> None:
    own = make_folder_path("weights", root=tmp_path)
    parts = own.name.split("-")
    parts[4] = str(int(parts[4]) - 1)  # an earlier process with this process's id
    (tmp_path / "-".join(parts)).mkdir()
    own.mkdir()
    assert [folder.name for folder in remove_orphans(tmp_path)] == ["-".join(parts)]
    assert own.is_dir()


def test_process_whose_name_is_no_text_is_another_owner(tmp_path: Path) -> None:
    set_name = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff'); print(flush=True); input()"
    parts = make_folder_path("weights", root=tmp_path).name.split("-")
    with subprocess.Popen(
        [sys.executable, "-c", set_name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        parts[3] = str(other.pid)
        folder = tmp_path / "-".join(parts)
        folder.mkdir()
        assert remove_orphans(tmp_path) == [folder]
        other.communicate(b"\n")


def test_folders_of_other_names_users_and_hosts_are_not_removed(tmp_path: Path) -> None:
    kind, user, process, start, space, key = make_folder_path("weights", root=tmp_path).name.split(
        "-"
    )[1:]
    dead = f"{process}-{int(start) - 1}"
    others = {
        "temper-notes",
        f"temper-{kind}-{int(user) + 1}-{dead}-{space}-{key}",
        f"temper-{kind}-{user}-{dead}-00000000-{key}",
        f"old-temper-{kind}-{user}-{dead}-{space}-{key}",
    }
    for name in others:
        (tmp_path / name).mkdir()
    assert remove_orphans(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == others


@pytest.mark.skipif(sys.platform != "linux", reason="needs the process ids of Linux")
def test_locked_folder_of_another_container_is_removed_after_the_end_of_its_process(
    tmp_path: Path,
) -> None:
    owner, folder = start_owner(tmp_path, LOCK)
    with owner:
        assert remove_orphans(tmp_path) == []
        assert folder.is_dir()
        owner.kill()
    assert remove_orphans(tmp_path) == [folder]
    assert not folder.exists()


def test_link_or_file_named_like_an_orphan_is_not_removed(tmp_path: Path) -> None:
    parts = make_folder_path("weights", root=tmp_path).name.split("-")
    parts[4] = str(int(parts[4]) - 1)  # a dead process
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / "-".join([*parts[:-1], "00000001"])
    link.symlink_to(target)
    file = tmp_path / "-".join([*parts[:-1], "00000002"])
    file.write_text("a file")
    assert remove_orphans(tmp_path) == []
    assert link.is_symlink()
    assert file.is_file()


def test_temporary_folder_is_private() -> None:
    folder = make_temporary_folder("test")
    assert f"-{os.getuid()}-{os.getpid()}-" in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_shared_memory_claimed_by_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, shared_file: Path
) -> None:
    subprocess.run([sys.executable, "-c", CLAIM, str(tmp_path), str(shared_file)], check=False)
    assert shared_file.exists()
    make_folder_path("weights", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not shared_file.exists()


def test_later_file_with_the_name_of_a_claimed_one_is_kept(
    tmp_path: Path, shared_file: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    claim_shared_memory(folder, [shared_file, SHARED_MEMORY / "psm_missing"])
    later = shared_file.with_name(f"{shared_file.name}-later")
    later.touch()
    later.replace(shared_file)
    remove_folder(folder)
    assert not folder.exists()
    assert shared_file.exists()


@pytest.mark.parametrize("text", ["[", "3", "[[1]]", '[[1, 2, "psm_a", 4]]', None])
def test_claims_that_are_damaged_or_may_be_of_another_user_remove_no_file(
    tmp_path: Path, shared_file: Path, text: str | None
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    claim_shared_memory(folder, [shared_file])
    if text is None:
        folder.chmod(0o777)  # anyone may have written the claims
    else:
        (folder / ".temper-claims").write_text(text)
    remove_folder(folder)
    assert not folder.exists()
    assert shared_file.exists()
