"""End the processes of a Ray cluster that a run started, once the run's own process is gone.

Ray's processes notice the death of a driver, but its agents (`ray::DashboardAgent`,
`ray::RuntimeEnvAgent`) were seen 43 s after a SIGKILL. So `RayGuard` starts a small process before
Ray: it reads a pipe that only the driver can write to, and ends what is left when that closes.
Every process of the cluster inherits an environment variable that tells it from other clusters.

Standard library alone, because this file is also the program of that process.
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
"""For Ray's processes to end by themselves, which writes their logs to the end."""


class RayGuard:
    """Started before a cluster of this machine; closed after it, or by the death of this process."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        reading, self._writing = os.pipe()
        self._process = subprocess.Popen(
            # -I: nothing of this environment is imported, which makes it start in 20 ms.
            [sys.executable, "-I", __file__, str(reading), self._token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(reading,),
            # Neither Ctrl-C in the terminal nor a signal to the driver's group may end it first.
            start_new_session=True,
        )
        os.close(reading)

    def __enter__(self) -> "RayGuard":
        """Mark every process that is started in the body."""
        os.environ[MARKER_VARIABLE] = self._token
        # Ray sets process titles, which overwrites the environment that /proc shows unless told so.
        os.environ["SPT_NOENV"] = "1"
        return self

    def __exit__(self, *exception: object) -> None:
        """Later children of this process are no part of the cluster."""
        del os.environ[MARKER_VARIABLE]
        del os.environ["SPT_NOENV"]

    def close(self) -> None:
        """Let the guard end what is left, and wait for it."""
        os.close(self._writing)
        self._process.wait()


def find_processes(token: str) -> list[int]:
    """Return the ids of this user's processes that inherited a guard's token."""
    found, entry = [], f"{MARKER_VARIABLE}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def _watch(reading: int, token: str) -> None:
    while os.read(reading, 1):
        pass
    deadline = time.monotonic() + EXIT_GRACE_S
    while find_processes(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Again, because a process may start others until it is ended itself.
    while left := find_processes(token):
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
