"""The end of a child process, also when the kernel removes it."""

import signal
import subprocess

import pytest

from temper_trainer.process_groups import has_ended


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
