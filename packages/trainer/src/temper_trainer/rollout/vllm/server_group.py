"""End the process group of a server, and remove the shared memory that its workers leave."""

import contextlib
import os
import signal
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
_OWN_PREFIX = "temper-"
"""Names of the trainer's own folders of weights, which the trainer removes."""


def kill_server_group(group: int) -> None:
    """Kill a process group; first remove the shared memory that only its processes map.

    Workers of a tensor-parallel vLLM exchange messages through shared memory whose names contain
    no process, so that no later start can tell whose it was. It loses its name here, and its memory
    is freed when the processes end.

    Raises:
        ProcessLookupError: If the group has no process.
    """
    for path in _find_shared_memory(group):
        with contextlib.suppress(OSError):
            Path(path).unlink()
    os.killpg(group, signal.SIGKILL)


def _find_shared_memory(group: int) -> set[str]:
    """Return files in shared memory that processes of a group map and no other process does."""
    own: set[str] = set()
    others: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_member = os.getpgid(int(folder.name)) == group
            lines = (folder / "maps").read_text().splitlines()
        except OSError:
            continue  # it has ended, or belongs to another user
        files = {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
        (own if is_member else others).update(files)
    return {
        path
        for path in own - others
        if not path.endswith(" (deleted)")
        and not path.removeprefix(SHARED_MEMORY).startswith(_OWN_PREFIX)
    }
