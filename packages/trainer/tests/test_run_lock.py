"""The lock of a run folder, with real processes and with lock files as other hosts leave them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock._util import exchange_names

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run_folder_checks import find_wrong_entries
from temper_trainer.run_lock import (
    LOCK_FILE,
    RunLock,
    RunLockLostError,
    find_lock_refusal,
    read_lock_owner,
)

HOLDER = """
import pathlib, sys, time
from temper_trainer.run_lock import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def write_lock(
    folder: Path, *, host: str, pid: int, start: int | None = None, lease_s: float = 60.0
) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        "filelock/2",
        f"pid={pid}",
        f"host={host}",
        "mode=lease",
        "token=1234",
        f"duration={lease_s!r}",
    ]
    (folder / LOCK_FILE).write_text(
        "".join(f"{line}\n" for line in [*lines, *([] if start is None else [f"start={start}"])])
    )


def test_second_process_is_refused_and_a_killed_one_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(tmp_path) as process:
        begin = time.monotonic()
        with (
            pytest.raises(
                ConfigError, match=f"in use by process {process.pid} on host .*, running since 20"
            ),
            RunLock(tmp_path),
        ):
            pass
        assert time.monotonic() - begin < 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK_FILE).exists()
        with RunLock(tmp_path):
            assert f"was left by process {process.pid}" in caplog.text
    assert not (tmp_path / LOCK_FILE).exists()


def test_check_reports_a_living_holder_in_the_words_of_the_start_and_changes_nothing(
    tmp_path: Path,
) -> None:
    with hold(tmp_path) as process:
        refusal = find_lock_refusal(tmp_path)
        with pytest.raises(ConfigError) as of_the_start, RunLock(tmp_path):
            pass
        assert refusal == str(of_the_start.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = [(path, path.stat()) for path in tmp_path.iterdir()]
        assert find_lock_refusal(tmp_path) is None, "the start takes over the lock of a dead owner"
        assert [(path, path.stat()) for path in tmp_path.iterdir()] == before
    assert find_lock_refusal(tmp_path / "new") is None


def test_check_leaves_an_owner_on_another_host_to_the_start(tmp_path: Path) -> None:
    write_lock(tmp_path, host="node17", pid=4711)
    assert find_lock_refusal(tmp_path) is None
    (tmp_path / LOCK_FILE).write_text("not a lock")
    assert find_lock_refusal(tmp_path) is None


def test_reused_process_id_is_not_reported_by_the_check(tmp_path: Path) -> None:
    write_lock(tmp_path, host=socket.gethostname(), pid=os.getpid(), start=1)
    assert find_lock_refusal(tmp_path) is None


def test_exactly_one_of_several_starting_processes_gets_the_lock(tmp_path: Path) -> None:
    program = HOLDER.replace("time.sleep(60)", "sys.stdin.read()")
    command = [sys.executable, "-c", program, str(tmp_path / "new")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(4)
    ]
    deadline = time.monotonic() + 60
    while sum(process.poll() is None for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(codes, key=str) == [1, 1, 1, None]


def test_reused_process_id_is_not_mistaken_for_the_owner(tmp_path: Path) -> None:
    write_lock(tmp_path, host=socket.gethostname(), pid=os.getpid(), start=1)
    with RunLock(tmp_path):
        pass


OTHER_BOOT = (0xF00D << 64) | 777
"""Start of a process on a machine with another boot id, as filelock writes it."""


def own_host() -> str:
    """Return the name of this host and PID namespace, as filelock writes it."""
    with tempfile.TemporaryDirectory() as folder, RunLock(Path(folder)):
        owner = read_lock_owner(Path(folder))
    assert owner is not None
    return owner.hostname


@pytest.mark.parametrize("is_same_name", [False, True])
def test_owner_on_another_host_with_a_heartbeat_keeps_the_lock(
    tmp_path: Path, is_same_name: bool
) -> None:
    host, start = (own_host(), OTHER_BOOT) if is_same_name else ("node17", None)
    write_lock(tmp_path, host=host, pid=4711987, start=start, lease_s=6.0)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.3):
            os.utime(tmp_path / LOCK_FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(ConfigError, match="in use by process 4711987 on host"),
            RunLock(tmp_path, lease_s=6.0),
        ):
            pass
    finally:
        is_over.set()
        thread.join()


def test_owner_on_another_host_without_a_heartbeat_is_replaced_after_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lock(tmp_path, host="node17", pid=4711, lease_s=1.0)
    begin = time.monotonic()
    with RunLock(tmp_path, lease_s=1.0):
        assert time.monotonic() - begin >= 1.0
    assert "is held by process 4711 on host node17: waiting up to 1 s" in caplog.text


@pytest.fixture
def _no_exchange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the file system of `tmp_path` refuse RENAME_EXCHANGE, as NFS and GlusterFS do.

    `docs/records/safety.md` has the same cases on these two file systems.
    """

    def refuse(source: str, target: str) -> bool:
        return not source.startswith(str(tmp_path)) and exchange_names(source, target)

    monkeypatch.setattr("filelock._soft.exchange_names", refuse)


@pytest.mark.usefixtures("_no_exchange")
def test_killed_process_is_replaced_at_once_on_a_shared_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(tmp_path) as process:
        process.kill()
    begin = time.monotonic()
    with RunLock(tmp_path) as lock:
        assert time.monotonic() - begin < 30
        lock.check()
        assert f"pid={os.getpid()}" in (tmp_path / LOCK_FILE).read_text()
    assert f"was left by process {process.pid}" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_no_exchange")
def test_owner_on_another_host_is_replaced_after_the_lease_on_a_shared_file_system(
    tmp_path: Path,
) -> None:
    write_lock(tmp_path, host="node17", pid=4711, lease_s=1.0)
    begin = time.monotonic()
    with RunLock(tmp_path, lease_s=1.0):
        assert 1.0 <= time.monotonic() - begin < 30
        assert f"pid={os.getpid()}" in (tmp_path / LOCK_FILE).read_text()


def test_killed_container_with_the_same_host_name_is_replaced_after_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lock(tmp_path, host=f"{socket.gethostname()}?pidns-f00d", pid=1, lease_s=1.0)
    begin = time.monotonic()
    with RunLock(tmp_path, lease_s=1.0):
        assert time.monotonic() - begin >= 1.0
    # Process 1 of this namespace is another one: when it started says nothing.
    assert "running since" not in caplog.text


def test_process_from_before_a_reboot_is_replaced_after_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lock(tmp_path, host=own_host(), pid=1, start=OTHER_BOOT, lease_s=1.0)
    assert find_lock_refusal(tmp_path) is None
    begin = time.monotonic()
    with RunLock(tmp_path, lease_s=1.0):
        assert time.monotonic() - begin >= 1.0
    assert "running since" not in caplog.text


def test_lock_file_without_an_owner_is_replaced_after_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replace_lock(name: str, content: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / LOCK_FILE).write_text(content)
        begin = time.monotonic()
        with RunLock(folder, lease_s=3.0) as lock:
            assert 3.0 <= time.monotonic() - begin < 30
            lock.check()
            assert f"pid={os.getpid()}" in (folder / LOCK_FILE).read_text()
        assert list(folder.iterdir()) == []

    contents = {"empty": "", "zeros": "\0" * 64, "text": "not a lock"}
    # At the same time, because each waits for its lease.
    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(replace_lock, contents, contents.values()))
    waiting = "names no owner: waiting up to 3 s to see whether it is being written"
    assert caplog.text.count(waiting) == len(contents)


def test_unreadable_lock_file_with_a_heartbeat_is_kept(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text("record of another version")
    timer = threading.Timer(4.0, os.utime, args=(path,))  # later than filelock would wait
    timer.start()
    with (
        pytest.raises(ConfigError, match="in use by another process"),
        RunLock(tmp_path, lease_s=12),
    ):
        pass
    timer.join()
    assert path.read_text() == "record of another version"


def test_lock_file_that_gets_its_owner_late_is_kept(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text("")

    def write_in_two_calls() -> None:
        time.sleep(0.5)
        os.utime(path)  # as if the file had been opened for writing again
        time.sleep(1.0)
        write_lock(tmp_path, host="node17", pid=4711)

    writer = threading.Thread(target=write_in_two_calls)
    writer.start()
    with (
        pytest.raises(ConfigError, match="in use by process 4711 on host node17"),
        RunLock(tmp_path),
    ):
        pass
    writer.join()


def test_lock_file_that_is_removed_after_its_heartbeat_is_taken(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text("")

    def touch_and_remove() -> None:
        time.sleep(0.5)
        os.utime(path)
        time.sleep(1.0)
        path.unlink()

    owner = threading.Thread(target=touch_and_remove)
    owner.start()
    with RunLock(tmp_path):
        assert f"pid={os.getpid()}" in path.read_text()
    owner.join()


def test_lost_lock_error_names_the_new_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path, lease_s=0.3) as lock:
        lock.check()
        (tmp_path / LOCK_FILE).unlink()
        write_lock(tmp_path, host="node17", pid=4711)
        time.sleep(1)
        with pytest.raises(RunLockLostError, match="now belongs to process 4711 on host node17"):
            lock.check()


def test_lost_lock_error_reports_a_deleted_lock_file(tmp_path: Path) -> None:
    with RunLock(tmp_path, lease_s=0.3) as lock:
        (tmp_path / LOCK_FILE).unlink()
        time.sleep(1)
        with pytest.raises(RunLockLostError, match=r"run\.lock is gone\. This process stops"):
            lock.check()


ENDED_WHILE_IT_LOCKS = """
import os, pathlib, signal, sys
from temper_trainer.run_lock import RunLock

def open_and_send_signal(path, *arguments, **keywords):
    descriptor = open_file(path, *arguments, **keywords)
    if str(path).endswith("run.lock"):
        os.open = open_file
        signal.raise_signal(signal.SIGTERM)
    return descriptor

lock = RunLock(pathlib.Path(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda number, frame: lock.abandon(lambda: os._exit(143)))
open_file, os.open = os.open, open_and_send_signal
with lock:
    print("the process went on")
"""


def test_process_that_is_ended_before_the_lock_has_its_owner_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED_WHILE_IT_LOCKS, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    assert not (tmp_path / "run").exists()


def test_file_instead_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            ConfigError, match=r"run\.dir is .*file, but .*file is a file: choose another run\.dir"
        ),
        RunLock(tmp_path / "file"),
    ):
        pass


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_other_entry_than_a_lock_file_is_refused_in_the_words_of_the_check(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / LOCK_FILE)
    with pytest.raises(ConfigError) as refusal, RunLock(tmp_path):
        pass
    assert [str(refusal.value)] == list(find_wrong_entries(tmp_path))


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc (Linux), which root cannot write to either"
)
def test_run_folder_that_cannot_be_written_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"run\.dir /proc/run cannot be written"),
        RunLock(Path("/proc/run")),
    ):
        pass
