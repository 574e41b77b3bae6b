"""Start the process that watches the policy's programs, and tell it which programs to watch."""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from temper_trainer.environment.protocol import BrokenEnvironmentError
from temper_trainer.environment.python_process import INTERPRETER_FLAGS, KillReason
from temper_trainer.environment.sandbox_supervisor import ENDED, SCRIPT, Limits

_REPORT_WITHIN_S = 10.0
"""Longest time for the report on a program that has ended."""
_lock = threading.Lock()
_supervisors: "dict[int, Supervisor]" = {}
"""Supervisors by the process that started them, because a forked process inherits this."""


class Supervisor:
    """A process that enforces limits on programs even if no thread of this process can run."""

    def __init__(self) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, *INTERPRETER_FLAGS, SCRIPT],
                stdin=remote.fileno(),
                stdout=subprocess.DEVNULL,
                env={},
                # A new session, so that Ctrl-C in the terminal does not end it before the programs.
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """False if the process has ended, for example because the machine is out of memory."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; programs that it still watches are given up with an error."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    @contextmanager
    def watch(
        self, process_id: int, *, limits: Limits, status_files: Sequence[int]
    ) -> Iterator["Watch"]:
        """Let the supervisor watch a process, which has not read its program yet.

        Args:
            process_id: A child that this process has not waited for.
            limits: Limits of the program.
            status_files: Status files of the outer bubblewrap, if there is one, and the inner one.

        Raises:
            BrokenEnvironmentError: If the supervisor has ended.
        """
        process = os.pidfd_open(process_id)
        report, remote = os.pipe()
        try:
            try:
                socket.send_fds(
                    self._control,
                    [json.dumps(asdict(limits)).encode()],
                    [process, remote, *status_files],
                )
            except (BrokenPipeError, ConnectionResetError) as error:
                raise BrokenEnvironmentError(_ENDED_EARLY) from error
            finally:
                os.close(process)
                os.close(remote)
            yield Watch(report)
        finally:
            os.close(report)


class Watch:
    """The supervisor's report on one program."""

    def __init__(self, report: int) -> None:
        self._report = report
        self._text = b""
        self._is_complete = False

    def check(self) -> None:
        """Check that the supervisor still watches the program.

        Raises:
            BrokenEnvironmentError: If it has ended.
        """
        self._read(0.0)

    def wait(self) -> KillReason | None:
        """Return why the supervisor has killed the program, or None if it has not.

        Call this method after the program has ended.

        Raises:
            BrokenEnvironmentError: If the supervisor has ended or does not answer.
        """
        deadline = time.monotonic() + _REPORT_WITHIN_S
        while not self._is_complete:
            if time.monotonic() >= deadline:
                raise BrokenEnvironmentError(
                    "the supervisor of the sandbox did not report the end of a program within "
                    f"{_REPORT_WITHIN_S:g} s"
                )
            self._read(deadline - time.monotonic())
        first_line = self._text.split(b"\n")[0]
        return None if first_line == ENDED else KillReason(**json.loads(first_line))

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._report], [], [], max(0.0, timeout_s))[0]:
            return
        data = os.read(self._report, 4096)
        self._text += data
        # Closed without the last line.
        if not data and not self._text.endswith(ENDED + b"\n"):
            raise BrokenEnvironmentError(_ENDED_EARLY)
        self._is_complete = self._text.endswith(ENDED + b"\n")


_ENDED_EARLY = "the supervisor of the sandbox has ended, although programs are running"


def open_supervisor() -> Supervisor:
    """Return the supervisor of this process; start it at the first call and if it has ended."""
    process = os.getpid()
    with _lock:
        supervisor = _supervisors.get(process)
        if supervisor is None or not supervisor.is_alive:
            supervisor = _supervisors[process] = Supervisor()
        return supervisor


@atexit.register
def _close_supervisor() -> None:
    supervisor = _supervisors.pop(os.getpid(), None)
    if supervisor is not None:
        supervisor.close()
