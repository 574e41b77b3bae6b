"""End the child processes of this process with all descendants, even after a SIGKILL."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_WATCHER = 'read -r _; kill -s KILL -- "-$0"'
"""Shell program that kills a process group when its standard input is closed."""


@contextmanager
def kill_group_on_exit(group_id: int) -> Iterator[None]:
    """Kill a process group if this process dies in the body, even by SIGKILL.

    PR_SET_PDEATHSIG would end only the first process of the group, and exists only on Linux.
    """
    # Start a new session, so that Ctrl-C in the terminal does not end the watcher before this
    # process.
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHER, str(group_id)],
        stdin=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    with watcher:
        try:
            yield
        finally:
            # Kill the watcher before its stdin closes. It would kill the group by its id, and the
            # id may have been reused.
            watcher.kill()


def kill_group(group_id: int) -> None:
    """Kill a process group, if it exists."""
    try:
        os.killpg(group_id, signal.SIGKILL)
    except ProcessLookupError:  # the usual case: nothing of the group is left
        pass
    except PermissionError:  # macOS: only zombies are left
        pass
