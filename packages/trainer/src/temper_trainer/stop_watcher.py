"""End a process after a stop signal, even while a call holds the GIL and blocks all its threads.

A second process waits for the signal, and then until the grace period ends. It writes one line and
lets a thread of the C library end the first process with the documented exit code. It also ends the
first process when a call of a reward blocks all its threads. Standard library only: the second
process runs this file as a program.
"""

import ctypes
import functools
import logging
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BLOCKED_CODE = 1
_EXIT_CODES = (*(128 + number for number in SIGNALS), _BLOCKED_CODE)
"""Exit codes after a signal, and after a call that blocks all threads."""

_POLL_S = 0.2
"""Interval at which the second process checks that the first one is alive."""
_AFTER_DEADLINE_S = 0.5
"""Time after the grace period in which the first process may end by itself and flush its output."""
_KILL_AFTER_S = 1.0
"""Time after which a process that has not ended with its exit code is killed."""

_LIST_WITHIN_S = 0.5
"""Longest time to list checkpoints: the disk may be the reason why the process does not stop."""
_UNKNOWN_STEP = (
    "Steps after the last checkpoint are lost; run.resume=auto continues from it, or starts at "
    "step 1 if there is none."
)

_TABLE_BYTES = 1 << 16
"""Size of the table of calls; those that do not fit in it are not watched."""

_MIN_BUSY_FRACTION = 0.25
"""Fraction of its limit that a call must have computed to be taken for the one with the GIL."""
_WAITING_FACTOR = 10
"""Factor of the limit for a call that does not compute: another thread may hold the GIL, for
example in a save, but not for that long."""
_MAX_STEP_S = 1.0
"""Maximum time that counts between two polls: both processes may be suspended for hours."""

_SIGEV_THREAD = 2
"""Constant of POSIX: notify by calling a function in a new thread."""


class _SignalEvent(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_ssize_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attribute", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _AsyncRead(ctypes.Structure):
    """`struct aiocb` of Linux; its private part is shorter than the padding."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigevent", _SignalEvent),
        ("padding", ctypes.c_byte * 256),
    )


class CallTable:
    """Open calls that may block all threads of this process, in memory that a child can read.

    The first line counts beats, one a second while Python's threads can run. Each of the others is
    a call: its thread, its limit in seconds, and the message.
    """

    def __init__(self) -> None:
        self.descriptor = -1  # memory of this process only
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("temper-calls")
            os.ftruncate(self.descriptor, _TABLE_BYTES)
        self._memory = mmap.mmap(self.descriptor, _TABLE_BYTES)
        self._lock = threading.Lock()
        self._calls: dict[int, bytes] = {}
        self._num_beats = 0

    @contextmanager
    def add(self, message: str, *, limit_s: float) -> Iterator[None]:
        """List a call of this thread while the body runs.

        Args:
            message: Line that is written if the call ends the process.
            limit_s: Time without a beat after which it does.
        """
        thread = threading.get_native_id()
        line = f"{thread} {limit_s:g} {message}".replace("\n", " ")
        with self._lock:
            self._calls[thread] = f"{line}\n".encode(errors="replace")
            self._write()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[thread]
                self._write()

    def list_threads(self) -> list[int]:
        """Return the native identifiers of the threads with an open call."""
        with self._lock:
            return list(self._calls)

    def beat(self) -> None:
        with self._lock:
            self._num_beats += 1
            self._write()

    def _write(self) -> None:
        content = b"beat %d\n" % self._num_beats + b"".join(self._calls.values())
        # Cut between two calls.
        content = content[: _TABLE_BYTES - 1].rpartition(b"\n")[0] + b"\0"
        self._memory[: len(content)] = content


@functools.cache
def open_call_table(process: int) -> CallTable:
    """Return this process's table; a forked process needs its own."""
    del process
    return CallTable()


def watch_call(message: str, *, limit_s: float) -> AbstractContextManager[None]:
    """Let a StopWatcher end this process if the body holds the GIL for too long.

    No thread can end such a call, for example a regular expression that backtracks. Works only on
    Linux.

    Args:
        message: One line, written before this process is ended; `{seconds}` is the time without
            the GIL, and `{saved}` a sentence about the last checkpoint.
        limit_s: Maximum time in which no other thread of Python can run. It is ten times as long
            if the body does not compute.
    """
    return open_call_table(os.getpid()).add(message, limit_s=limit_s)


def kill_started_processes(threads: Iterable[int]) -> None:
    """Kill the processes that threads of this process have started, with all their descendants.

    Works only on Linux.
    """
    _kill_processes(_list_descendants(os.getpid(), threads))


def _list_descendants(process: int, threads: Iterable[int]) -> list[int]:
    """Return the processes that threads of a process have started, with all their descendants."""
    descendants = []
    for thread in threads:
        try:
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children = list(map(int, file.read().split()))
        except OSError:  # it has ended, or the system has no such file
            continue
        for child in children:
            descendants.append(child)
            try:
                descendants += _list_descendants(child, map(int, os.listdir(f"/proc/{child}/task")))
            except OSError:  # the child has ended
                continue
    return descendants


def _kill_processes(processes: Iterable[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user
            continue


class StopWatcher:
    """Separate process that ends this process if it is still running some time after a signal.

    It also ends it if a call in `watch_call` blocks all threads.

    Args:
        wakeup: Receives signal numbers from `signal.set_wakeup_fd`, which needs no GIL.
            SIGNALS must be left in it, because the second process peeks at it.
        grace_s: Time between the signal and the end.
        message: Written before this process is ended; `{signal}` is the signal's name, and
            `{saved}` a sentence about the last checkpoint.
        run_dir: The run folder; empty if there is none.
    """

    def __init__(
        self, wakeup: socket.socket, *, grace_s: float, message: str, run_dir: str = ""
    ) -> None:
        triggers = [_open_trigger(os.getpid(), code).descriptor for code in _EXIT_CODES]
        table = open_call_table(os.getpid()).descriptor
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", __file__),
                *(str(os.getpid()), str(wakeup.fileno()), str(grace_s), message, run_dir),
                *map(str, (table, *triggers)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[wakeup.fileno(), *triggers, *([table] if table >= 0 else [])],
            # A new session, so that Ctrl-C in the terminal does not end the watcher.
            start_new_session=True,
        )

    def close(self) -> None:
        """End the second process."""
        self._process.kill()
        self._process.wait()


class _ExitTrigger:
    """A file descriptor. A write to it ends this process with the given exit code.

    With asynchronous reads, the C library calls `_exit` from a thread that does not know about
    Python. On systems without such reads (macOS), writing has no effect, and the process is killed.
    """

    def __init__(self, code: int) -> None:
        # Neither end is ever closed, because closing the pipe would complete the read, too.
        self._reader, self.descriptor = os.pipe()
        self._buffer = ctypes.create_string_buffer(1)
        library = ctypes.CDLL(None)
        if not sys.platform.startswith("linux") or not hasattr(library, "aio_read"):
            return
        event = _SignalEvent(
            value=code,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(library._exit, ctypes.c_void_p).value,
        )
        self._request = _AsyncRead(
            fildes=self._reader,
            buf=ctypes.addressof(self._buffer),
            nbytes=1,
            sigevent=event,
        )
        if library.aio_read(ctypes.byref(self._request)) != 0:
            logger.warning(
                "asynchronous reads are not available: a process that has to be ended by force "
                "will have the exit code of SIGKILL"
            )


@functools.cache
def _open_trigger(process: int, code: int) -> _ExitTrigger:
    """Return this process's trigger for an exit code; a forked process needs its own."""
    del process
    return _ExitTrigger(code)


def main(arguments: Sequence[str]) -> None:
    """Wait for a stop signal or a blocking call; end the parent process if that is due."""
    for number in (*SIGNALS, signal.SIGHUP):
        # Launchers send the stop signal to all processes in a job; this one must outlive it.
        signal.signal(number, signal.SIG_IGN)
    process, descriptor, grace_s, message, run_dir, table, *triggers = arguments
    parent = _Parent(int(process))
    calls = _CallWatch(parent.process, descriptor=int(table))
    with socket.socket(fileno=int(descriptor)) as wakeup:
        reason = parent.wait_for_reason(wakeup, calls=calls)
    if isinstance(reason, str):
        code, text = _BLOCKED_CODE, reason
    elif reason is None or parent.ends_within(float(grace_s) + _AFTER_DEADLINE_S):
        return
    else:
        code, text = 128 + reason, message.replace("{signal}", signal.Signals(reason).name)
    text = text.replace("{saved}", describe_saved_step(run_dir))
    # A pipe that no one reads must not block this process.
    if select.select([], [2], [], 0)[1]:
        os.write(2, f"{text}\n".encode())
    # Listed before its end, after which they have another parent.
    started = _list_descendants(parent.process, calls.list_threads())
    os.write(int(triggers[_EXIT_CODES.index(code)]), b"x")
    if not parent.ends_within(_KILL_AFTER_S):
        os.kill(parent.process, signal.SIGKILL)
    _kill_processes(started)


class _CallWatch:
    """Finds a call in the parent's CallTable that blocks all threads."""

    def __init__(self, process: int, *, descriptor: int) -> None:
        self._process = process
        self._table = mmap.mmap(descriptor, _TABLE_BYTES, prot=mmap.PROT_READ)
        self._content = b""
        self._polled_at = time.monotonic()
        self._blocked_s = 0.0
        """Time since the last change, which shows that a thread of Python has run."""
        self._busy_s: dict[str, float] = {}
        """Computing time of the threads at the last change."""

    def find_blocking(self) -> str | None:
        """Return the message of a call that has held the GIL longer than its limit.

        One that has computed for a part of the time holds it; on a busy machine the part may be
        small. One that has not may only wait for it, and has a longer limit.
        """
        content, now = self._table[:], time.monotonic()
        step_s, self._polled_at = min(now - self._polled_at, _MAX_STEP_S), now
        if content != self._content:
            self._content, self._blocked_s, self._busy_s = content, 0.0, {}
            return None
        if self._read_stat("stat")[0] not in "Tt":  # not stopped, as by Ctrl-Z or a debugger
            self._blocked_s += step_s
        for thread, limit_s, message in _parse_calls(content):
            busy_s = self._measure_busy_s(thread)
            busy_s -= self._busy_s.setdefault(thread, busy_s)
            limit = float(limit_s)
            if busy_s < _MIN_BUSY_FRACTION * limit:
                limit *= _WAITING_FACTOR
            if self._blocked_s >= limit:
                return message.replace("{seconds}", f"{limit:g}")
        return None

    def list_threads(self) -> list[int]:
        """Return the threads with an open call."""
        return [int(thread) for thread, _, _ in _parse_calls(self._table[:])]

    def _measure_busy_s(self, thread: str) -> float:
        fields = self._read_stat(f"task/{thread}/stat")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _read_stat(self, name: str) -> list[str]:
        """Return the fields of a file of the kernel, from the state on."""
        try:
            with open(f"/proc/{self._process}/{name}") as file:
                # The name of the program, in parentheses, may contain spaces.
                return file.read().rpartition(")")[2].split()
        except OSError:  # the process ends
            return ["X", *["0"] * 12]


def _parse_calls(content: bytes) -> list[list[str]]:
    """Return thread, limit in seconds and message of each call in a CallTable."""
    lines = content.partition(b"\0")[0].decode().split("\n")[1:]
    return [line.split(" ", 2) for line in lines]


@dataclass(frozen=True, slots=True)
class _Parent:
    """The process that started this one."""

    process: int

    def is_alive(self) -> bool:
        return os.getppid() == self.process

    def ends_within(self, timeout_s: float) -> bool:
        """Wait until it has ended, or for at most `timeout_s`; return True if it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left_s))
        return not self.is_alive()

    def wait_for_reason(self, wakeup: socket.socket, *, calls: _CallWatch) -> int | str | None:
        """Return the first of SIGNALS that it receives, or the message of a call that blocks it.

        Returns None if it ends before.
        """
        while self.is_alive():
            if (message := calls.find_blocking()) is not None:
                return message
            if not select.select([wakeup], [], [], _POLL_S)[0]:
                continue
            try:
                received = wakeup.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:  # the parent has read the number of another signal
                continue
            if not received:
                return None
            if (number := find_signal(received)) is not None:
                return number
            time.sleep(_POLL_S)  # until the parent has read the number of another signal
        return None


def describe_saved_step(run_dir: str) -> str:
    """Return a sentence on the newest complete checkpoint in a run folder."""
    sentences: list[str] = []
    listing = threading.Thread(
        target=lambda: sentences.append(_list_saved_step(run_dir)), daemon=True
    )
    listing.start()
    listing.join(_LIST_WITHIN_S)
    return sentences[0] if sentences else _UNKNOWN_STEP


def _list_saved_step(run_dir: str) -> str:
    if not run_dir:
        return _UNKNOWN_STEP
    for folder, phase in (("checkpoints", ""), ("warm_start/checkpoints", " of the warm start")):
        root = os.path.join(run_dir, folder)
        names = os.listdir(root) if os.path.isdir(root) else []
        steps = [
            int(match[1])
            for name in names
            if (match := re.fullmatch(r"step_(\d{8,})", name))
            and os.path.isfile(os.path.join(root, name, "manifest.json"))
        ]
        if steps:
            return (
                f"The last checkpoint is that of step {max(steps)}{phase}: run.resume=auto "
                "continues from it."
            )
    return "No checkpoint of this run was saved: run.resume=auto starts at step 1."


def find_signal(received: bytes) -> int | None:
    """Return the first of SIGNALS in the bytes that arrived; None if there is none."""
    return next((number for number in received if number in SIGNALS), None)


if __name__ == "__main__":
    main(sys.argv[1:])
