"""End the processes of a Ray cluster that a run started, once the run's own process is gone.

Ray's processes notice the death of a driver, but its agents (`ray::DashboardAgent`,
`ray::RuntimeEnvAgent`) were seen 43 s after a SIGKILL. So `RayGuard` starts a small process before
Ray. It reads a pipe that only the driver can write to; when the pipe closes, it kills the remaining
processes. Every process of the cluster inherits an environment variable that identifies the
cluster.

This file is also the program of that process, so it imports only the standard library.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARKER_VARIABLE = "TEMPER_RAY_CLUSTER"
EXIT_GRACE_S = 3.0
"""Time for Ray's processes to end by themselves, which completes their logs."""


class RayGuard:
    """Watches a cluster on this host. Start it before the cluster; close it afterwards."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        # Python's pipes are not inherited, so no child of the driver keeps the writing end open.
        reading, self._writing = os.pipe()
        self._process = subprocess.Popen(
            # -I ignores the environment and site-packages, so that it starts in 20 ms.
            [sys.executable, "-I", __file__, str(reading), self._token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(reading,),
            # In its own session: Ctrl-C or a signal to the driver's process group must not end it.
            start_new_session=True,
        )
        os.close(reading)

    def __enter__(self) -> "RayGuard":
        """Mark every process that is started in the body."""
        os.environ[MARKER_VARIABLE] = self._token
        # Ray sets process titles. Setting a title overwrites the environment in /proc, which
        # `find_processes` reads, unless this variable of setproctitle is set.
        os.environ["SPT_NOENV"] = "1"
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop marking: later children do not belong to the cluster."""
        del os.environ[MARKER_VARIABLE]
        del os.environ["SPT_NOENV"]

    def close(self) -> None:
        """Let the guard kill the remaining processes, and wait for it."""
        os.close(self._writing)
        self._process.wait()


def find_processes(token: str) -> list[int]:
    """Return the ids of this user's processes whose environment has the token of a RayGuard."""
    processes, entry = [], f"{MARKER_VARIABLE}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                processes.append(int(folder.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return processes


def _watch(reading: int, token: str) -> None:
    # read() returns an empty result when the last writer, the driver, is gone.
    while os.read(reading, 1):
        pass
    deadline = time.monotonic() + EXIT_GRACE_S
    while find_processes(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Repeated, because a process may start others until it is killed.
    while remaining := find_processes(token):
        for process in remaining:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
