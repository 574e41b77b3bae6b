"""Run one Python program in a process of its own, with limits on time, memory and output."""

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from temper_trainer.process_groups import has_ended, kill_group, kill_group_on_exit

MAX_OUTPUT_BYTES = 1 << 16
"""Bytes of stdout, and of stderr, after which a program is killed."""
MAX_FILE_BYTES = 1 << 26
"""Largest size of a file; in bubblewrap, of all files in the program's folder."""
MAX_OPEN_FILES = 64
MAX_THREADS = 64

INTERPRETER_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
"""Standard library only: no site-packages, no environment variables, no __pycache__."""

RUNNER = """
import resource, sys
for limit in sys.argv[1:]:
    name, _, value = limit.partition("=")
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
sys.argv[:] = ["<tool>"]
code = sys.stdin.buffer.read().decode()
exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
"""
"""Lowers the limits NAME=VALUE in its arguments, then runs the program that it reads from stdin."""

_POLL_S = 0.02
"""Longest time between two checks of a process without output."""
_DRAIN_S = 1.0
"""Longest time to read the pipes of a process that has ended. A killed one closes them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Outcome of one program."""

    output: str
    """Its output, then the last line of its error if it failed."""
    is_timeout: bool
    """True if it was killed because its time was up."""
    is_failed: bool
    """True if it raised, exited with an error or was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReason:
    """Reason for which a program was killed."""

    reason: str
    is_timeout: bool = False
    """True if its time was up."""


class Watch(Protocol):
    """Another process that enforces limits on a program."""

    def check(self) -> None:
        """Raise an error if the program is no longer watched."""
        ...

    def wait(self) -> KillReason | None:
        """Return why the program was killed, or None if it was not; call it after the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedProcess:
    """Output and status of a process that has ended."""

    stdout: bytes
    stderr: bytes
    returncode: int
    """Negative if a signal ended it."""
    killed: KillReason | None
    """None if it ended by itself."""

    def to_result(self) -> SandboxResult:
        """Return the outcome as the policy reads it."""
        output, error = (
            data.decode("utf-8", errors="replace") for data in (self.stdout, self.stderr)
        )
        is_failed = self.killed is not None or self.returncode != 0
        reason = error.strip().splitlines()[-1:] if is_failed else []
        if self.killed is not None:
            reason = [f"error: {self.killed.reason}"]
        elif is_failed and not reason:
            reason = [f"error: the program ended with status {self.returncode}"]
        text = "\n".join(part for part in (output.rstrip("\n"), *reason) if part)
        is_timeout = self.killed is not None and self.killed.is_timeout
        return SandboxResult(output=text, is_timeout=is_timeout, is_failed=is_failed)


def build_resource_limits(*, timeout_s: float, memory_mib: int) -> dict[str, int]:
    """Return the limits for one program; keys are names in the module `resource`."""
    return {
        "RLIMIT_AS": memory_mib << 20,
        "RLIMIT_CPU": max(1, int(timeout_s) + 1),
        "RLIMIT_FSIZE": MAX_FILE_BYTES,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
    }


def run_process(
    command: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    watch: Callable[[int], AbstractContextManager[Watch]] | None = None,
    has_watcher: bool = False,
) -> FinishedProcess:
    """Run a command in a new session and kill what is left of its process group when it ends.

    Args:
        command: Program and arguments.
        stdin: Written to its standard input, which is then closed.
        timeout_s: Wall-clock time, after which it is killed.
        folder: Its working directory.
        environment: All its environment variables; none are inherited.
        pass_fds: File descriptors that it inherits.
        watch: Called with the process id before `stdin` is written.
        has_watcher: Start a second process that kills the group if this one is killed. Only for a
            command that does nothing before it has read all of its standard input.
    """
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=dict(environment or {}),
        pass_fds=pass_fds,
        start_new_session=True,
    )
    killed = None
    with ExitStack() as stack:
        stack.enter_context(process)
        pipes = stack.enter_context(closing(_Pipes(process, stdin)))
        # The process is not waited for before the group and its watcher are killed: its id may
        # belong to other processes afterwards.
        with kill_group_on_exit(process.pid) if has_watcher else nullcontext():
            try:
                watched = None if watch is None else stack.enter_context(watch(process.pid))
                while not has_ended(process) and killed is None:
                    pipes.transfer(min(_POLL_S, max(0.0, deadline - time.monotonic())))
                    if time.monotonic() >= deadline and not has_ended(process):
                        killed = KillReason(
                            reason=f"no result within {timeout_s:g} s", is_timeout=True
                        )
                    elif pipes.is_full:
                        killed = _TOO_MUCH_OUTPUT
                    elif watched is not None:
                        watched.check()
            finally:
                kill_group(process.pid)
        process.wait()
        if killed is None:
            killed = None if watched is None else watched.wait()
            pipes.drain(time.monotonic() + _DRAIN_S)
            if pipes.is_full:
                killed = _TOO_MUCH_OUTPUT
    return FinishedProcess(
        stdout=pipes.stdout,
        stderr=pipes.stderr,
        returncode=process.returncode,
        killed=killed,
    )


_TOO_MUCH_OUTPUT = KillReason(reason=f"more than {MAX_OUTPUT_BYTES} bytes of output")


class _Pipes:
    """Standard streams of a process that never block.

    A program may neither read its input nor close its output.
    """

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input = memoryview(stdin)
        self._stdout, self._stderr = bytearray(), bytearray()
        self._read = {process.stdout.fileno(): self._stdout, process.stderr.fileno(): self._stderr}
        self._stdin = process.stdin
        self._selector = selectors.DefaultSelector()
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        for number in self._read:
            self._selector.register(number, selectors.EVENT_READ)

    @property
    def stdout(self) -> bytes:
        return bytes(self._stdout[:MAX_OUTPUT_BYTES])

    @property
    def stderr(self) -> bytes:
        return bytes(self._stderr[:MAX_OUTPUT_BYTES])

    @property
    def is_full(self) -> bool:
        return any(len(data) > MAX_OUTPUT_BYTES for data in self._read.values())

    @property
    def is_open(self) -> bool:
        return bool(self._selector.get_map())

    def transfer(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for a stream to be ready, then read or write the ready ones."""
        if not self.is_open:
            time.sleep(min(timeout_s, 0.001))  # all streams are closed: the process is about to end
        for key, _ in self._selector.select(timeout_s) if self.is_open else ():
            if key.fd in self._read:
                data = os.read(key.fd, 1 << 16)
                self._read[key.fd] += data
                if not data:
                    self._selector.unregister(key.fd)
            else:
                self._write()

    def close(self) -> None:
        self._selector.close()

    def drain(self, deadline: float) -> None:
        """Read to the end of both streams, or until the deadline."""
        while self.is_open and not self.is_full and time.monotonic() < deadline:
            self.transfer(max(0.0, deadline - time.monotonic()))

    def _write(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin.fileno(), self._input) :]
        except BrokenPipeError:  # the program ended without reading it all
            self._input = self._input[:0]
        if not self._input:
            self._selector.unregister(self._stdin.fileno())
            self._stdin.close()
