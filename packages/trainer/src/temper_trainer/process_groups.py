"""Kill the process groups of child processes, even if this process ends by SIGKILL.

A descendant that starts a session or a group of its own is not killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WATCHER = 'read -r _; { kill -s KILL -- "-$0" || kill -s KILL "$0"; } 2> /dev/null'
"""Shell program that kills a process group when its standard input is closed.

While there is no such group, it kills the process that will create it.
"""


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


def has_ended(process: subprocess.Popen[bytes], *, is_waiting: bool = False) -> bool:
    """Return True if a child has ended.

    Its id is not reused until `process.wait()`, so its group can be killed without hitting
    processes of others. This is not true with Python before 3.13 on macOS, nor if this process
    ignores SIGCHLD: the child is waited for.

    Args:
        process: The child.
        is_waiting: Wait for the end.
    """
    if sys.platform == "darwin" and sys.version_info < (3, 13):  # has no waitid
        return (process.wait() if is_waiting else process.poll()) is not None
    options = os.WEXITED | os.WNOWAIT | (0 if is_waiting else os.WNOHANG)
    try:
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:  # SIGCHLD is ignored, so the kernel has removed the child
        return True
