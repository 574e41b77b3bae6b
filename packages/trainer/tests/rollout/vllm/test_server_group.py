"""Test that a killed group of server processes leaves nothing in shared memory."""

import mmap
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from temper_engine_api.process_folders import make_temporary_folder, remove_folder
from temper_trainer.rollout.vllm.server_group import kill_server_group

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the files that a process maps"
)
LEADER = """
import sys, subprocess, time
from multiprocessing.shared_memory import SharedMemory
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], "worker"])
else:
    own, shared = SharedMemory(create=True, size=4096), SharedMemory(create=True, size=4096)
    print(own.name, shared.name, flush=True)
time.sleep(600)
"""
CLAIMING_LEADER = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from temper_trainer.rollout.vllm import server_group
server_group.CLAIM_INTERVAL_S = 0.01
first = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
semaphore = "sem." + lock._semlock.name[1:]
with server_group.claim_worker_memory(Path(sys.argv[1])):
    if sys.argv[2] == "starts":
        print(first.name, semaphore, flush=True)
        time.sleep(600)
    last = SharedMemory(create=True, size=4096)
print(first.name, semaphore, last.name, flush=True)
time.sleep(600)
"""
MAPPER = """
import mmap, sys, time
maps = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
        maps[-1][0] = 1
print("mapped", flush=True)
time.sleep(600)
"""
UNREADABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)" + MAPPER  # PR_SET_DUMPABLE
KILLER = """
import subprocess, sys
from temper_trainer.rollout.vllm.server_group import kill_server_group
command = [sys.executable, "-c", *sys.argv[1:]]
group = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
group.stdout.readline()
kill_server_group(group.pid)
group.wait(10)
"""
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def start_mapper(
    *paths: Path, program: str = MAPPER, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own that maps files, which are created."""
    for path in paths:
        path.write_bytes(bytes(4096))
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", program, *paths],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        try:
            yield process
        finally:
            process.kill()
            for path in paths:
                path.unlink(missing_ok=True)


def test_killed_group_leaves_no_shared_memory_but_what_others_map() -> None:
    command = [sys.executable, "-c", LEADER, LEADER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        own, shared = leader.stdout.readline().split()
        mapped = SharedMemory(shared)
        # It would remove the file itself when this process ends.
        resource_tracker.unregister(f"/{shared}", "shared_memory")
        assert Path("/dev/shm", own).exists()
        kill_server_group(leader.pid)
    assert not Path("/dev/shm", own).exists()
    assert Path("/dev/shm", shared).exists()
    mapped.close()
    Path("/dev/shm", shared).unlink()


@pytest.mark.parametrize("moment", ["starts", "serves"])
def test_memory_of_a_group_that_was_killed_at_once_is_removed_with_the_folder(moment: str) -> None:
    folder = make_temporary_folder("server")
    command = [sys.executable, "-c", CLAIMING_LEADER, folder, moment]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        memory = [SHARED_MEMORY / name for name in leader.stdout.readline().split()]
        deadline = time.monotonic() + 60
        while any(path.name not in read_claims(folder) for path in memory):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(leader.pid, signal.SIGKILL)
    assert all(path.exists() for path in memory)
    remove_folder(folder)
    assert not any(path.exists() for path in memory)


@pytest.mark.parametrize(
    ("obstacle", "message"),
    [
        ("", "could not claim the shared memory of this server's workers: "),
        ("server_group._find_shared_memory = lambda group: time.sleep(600)", "took longer than"),
    ],
    ids=["folder-is-missing", "scan-hangs"],
)
def test_server_starts_although_its_shared_memory_cannot_be_claimed(
    tmp_path: Path, obstacle: str, message: str
) -> None:
    first_line, rest = CLAIMING_LEADER.split("first =")
    program = f"{first_line}{obstacle}\nfirst ={rest}"
    command = [sys.executable, "-c", program, str(tmp_path / "missing"), "serves"]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as leader,
    ):
        assert leader.stdout is not None
        names = leader.stdout.readline().split()
        os.killpg(leader.pid, signal.SIGKILL)
    for name in names:
        (SHARED_MEMORY / name).unlink()
    assert len(names) == 3
    assert log.read_text().count(message) == 1
    assert "Traceback" not in log.read_text()


def read_claims(folder: Path) -> str:
    file = folder / ".temper-claims"
    return file.read_text() if file.exists() else ""


def test_only_files_with_names_of_workers_are_removed() -> None:
    folder = Path(tempfile.mkdtemp(prefix="server-group-test-", dir=SHARED_MEMORY))
    kept = [folder / f"psm_{secrets.token_hex(4)}", SHARED_MEMORY / f"{folder.name}.safetensors"]
    removed = [
        SHARED_MEMORY / f"psm_{secrets.token_hex(4)}",
        SHARED_MEMORY / f"41234-tp:0-[0-1]-cpushm_{folder.name}",
    ]
    with start_mapper(*kept, *removed) as group:
        kill_server_group(group.pid)
        assert [path.exists() for path in kept] == [True, True]
        assert [path.exists() for path in removed] == [False, False]
    folder.rmdir()


def test_file_that_a_mapped_path_only_ends_with_is_kept(tmp_path: Path) -> None:
    mapped = tmp_path / "dev/shm" / f"psm_{secrets.token_hex(4)}"
    mapped.parent.mkdir(parents=True)
    unrelated = SHARED_MEMORY / mapped.name
    unrelated.touch()
    with start_mapper(mapped) as group:
        kill_server_group(group.pid)
        assert mapped.exists()
    unrelated.unlink()


def test_replaced_file_is_kept() -> None:
    path = SHARED_MEMORY / f"psm_{secrets.token_hex(4)}"
    with start_mapper(path) as group:
        path.unlink()
        path.touch()
        kill_server_group(group.pid)
        assert path.exists()


def test_group_is_killed_while_a_process_maps_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    path = SHARED_MEMORY / f"psm_{secrets.token_hex(4)}"
    with Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 0), start_mapper(path) as group:
            kill_server_group(group.pid)
            assert group.wait(10) == -signal.SIGKILL
            assert not path.exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_file_that_an_unreadable_process_may_map_is_kept() -> None:
    path = SHARED_MEMORY / f"psm_{secrets.token_hex(4)}"
    # Root may read every process, unless it gives up its capabilities.
    prefix = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    with start_mapper(path, program=UNREADABLE, prefix=prefix):
        command = [*prefix, sys.executable, "-c", KILLER, MAPPER, str(path)]
        subprocess.run(command, check=True, timeout=60)
        assert path.exists()
