"""Watch the programs of the policy from a process of its own, and kill those over a limit.

The trainer cannot do this itself: while one thread holds the GIL, for example in a regular
expression of a reward, its other threads do not run.

This file is a script that imports only the standard library, so that the process starts in
milliseconds and shares nothing with the trainer. `Supervisor` in supervisor_process.py starts it.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = __file__
ENDED = b"ended"
"""Last line of the report on a program; a `KillReason` in JSON is before it if it was killed."""

_MAX_MESSAGE_BYTES = 4096
_MAX_DESCRIPTORS = 4
_POLL_S = 0.02
"""Time between two checks of a program. Each reads a few files of /proc, about 0.1 ms."""
_MEMORY_IN_STATUS = re.compile(rb"^(?:RssAnon|VmPTE):\s*(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a program that the kernel's limits per process do not cover, or only in part."""

    timeout_s: float
    deadline: float
    """Time of `time.monotonic`, which all processes of a machine share."""
    memory_mib: int
    """Largest size of the program's pages and page tables."""
    max_files: int
    """Largest number of files in `folder`."""
    folder: str
    """The program's own folder, as it sees it."""
    folder_bytes: int
    """Size of the file system of `folder`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One program, and the descriptors by which it is watched."""

    limits: Limits
    process: int
    """pidfd of the outermost bubblewrap; its exit kills all other processes."""
    report: int
    """Pipe to the trainer."""
    status_files: Sequence[int]
    """Status files of the outer bubblewrap, if there is one, and of the inner one."""

    def find_exceeded_limit(self) -> dict[str, object] | None:
        """Return which limit the program exceeds, or None."""
        if time.monotonic() >= self.limits.deadline:
            return {
                "reason": f"no result within {self.limits.timeout_s:g} s",
                "is_timeout": True,
            }
        children = [read_status(file).get("child-pid") for file in self.status_files]
        if None in children:  # not started yet
            return None
        # With two bubblewraps, the inner one has a process id of the outer one's namespace, so look
        # for it in the /proc of that namespace.
        proc = "".join(f"/proc/{child}/root" for child in children[:-1]) + "/proc"
        try:
            if self._count_files(f"{proc}/{children[-1]}/root") > self.limits.max_files:
                return {"reason": f"more than {self.limits.max_files} files"}
            if _measure_memory(proc, parent=str(children[-1])) > self.limits.memory_mib << 20:
                return {"reason": f"more than {self.limits.memory_mib} MiB of memory"}
        except OSError:  # it has just ended
            pass
        return None

    def kill(self, reason: dict[str, object]) -> None:
        """Report the exceeded limit, and kill the program."""
        self._write_report(json.dumps(reason).encode())
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def end(self) -> None:
        """Report that the program has ended, and close the descriptors."""
        self._write_report(ENDED)
        for file in (self.process, self.report, *self.status_files):
            os.close(file)

    def _write_report(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the call was given up, as at Ctrl-C
            os.write(self.report, text + b"\n")

    def _count_files(self, root: str) -> int:
        """Return the number of files in the program's folder.

        The size limit of the folder does not limit their number. Yet even an empty file costs the
        kernel about a kilobyte, which no other limit covers.
        """
        usage = os.statvfs(root + self.limits.folder)
        # Until the program's own folder is mounted, the path leads to the host's folder, which has
        # another size and must not be counted.
        is_ready = usage.f_blocks * usage.f_frsize == self.limits.folder_bytes
        return usage.f_files - usage.f_ffree if is_ready else 0


def _measure_memory(proc: str, *, parent: str) -> int:
    """Return the bytes of the program's pages and page tables.

    RLIMIT_AS limits only the pages. A page far from all others needs separate page tables, which
    take twice the page's size.

    Args:
        proc: A mounted /proc.
        parent: The first process of the sandbox, whose only child is the program.
    """
    total = 0
    for child in Path(proc, parent, "task", parent, "children").read_text().split():
        # Bytes, because it has the name of the process, which the program may set to any bytes.
        status = Path(proc, child, "status").read_bytes()
        total += sum(int(size) << 10 for size in _MEMORY_IN_STATUS.findall(status))
    return total


def read_status(file: int) -> dict[str, int]:
    """Return what bubblewrap has reported so far.

    It reports child-pid when it starts the program and exit-code when the program ends.
    """
    lines = os.pread(file, 4096, 0).decode().split("\n")[:-1]
    return {name: value for line in lines for name, value in json.loads(line).items()}


def _receive_call(control: socket.socket) -> Call | None:
    """Return the next program to watch, or None if the trainer has ended."""
    message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
    if not message:
        return None
    process, report, *status_files = descriptors
    return Call(Limits(**json.loads(message)), process, report, status_files)


def watch_programs(control: socket.socket) -> None:
    """Watch the programs of a trainer until it closes its end of `control` or dies."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    calls: dict[int, Call] = {}
    killed: set[int] = set()
    next_poll = 0.0
    while True:
        timeout = max(0.0, next_poll - time.monotonic()) if calls else None
        for key, _ in selector.select(timeout):
            if key.fileobj is control:
                call = _receive_call(control)
                if call is None:
                    return  # with --die-with-parent, the programs end by themselves
                calls[call.process] = call
                selector.register(call.process, selectors.EVENT_READ)
            else:  # a pidfd becomes readable when its process ends
                selector.unregister(key.fd)
                killed.discard(key.fd)
                calls.pop(key.fd).end()
        if time.monotonic() < next_poll:
            continue
        next_poll = time.monotonic() + _POLL_S
        for process, call in calls.items():
            if process not in killed and (reason := call.find_exceeded_limit()) is not None:
                call.kill(reason)
                killed.add(process)


if __name__ == "__main__":
    # Each call takes four descriptors.
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    watch_programs(socket.socket(fileno=sys.stdin.fileno()))
