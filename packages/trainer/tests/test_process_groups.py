"""The end of child processes, also when the kernel removes them, or their parent is killed."""

import signal
import subprocess
import sys

import pytest

from temper_trainer.process_groups import has_ended

KILLED_PARENT = """
import os, signal, subprocess, sys
from temper_trainer.process_groups import kill_group_on_exit

child = subprocess.Popen(["sleep", "60"])  # it has not created its group yet
with kill_group_on_exit(child.pid):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_waiting", [True, False])
def test_child_that_the_kernel_has_removed_has_ended(is_waiting: bool) -> None:
    # A program that ignores SIGCHLD passes that on to the programs that it starts.
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
            assert not has_ended(process)
            assert process.stdin is not None
            process.stdin.close()
            while not has_ended(process, is_waiting=is_waiting):
                pass
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_child_that_has_no_group_yet_ends_with_its_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as parent:
        # The output ends when the child, which has the same, has ended.
        output, _ = parent.communicate(timeout=20)
        assert parent.returncode == -signal.SIGKILL
    assert output == b""
