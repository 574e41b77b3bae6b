"""Run Python programs that the policy wrote: in bubblewrap, or with limits alone."""

import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from temper_engine_api.errors import ConfigError
from temper_engine_api.process_folders import open_temporary_folder
from temper_trainer.config.environment import SandboxName
from temper_trainer.environment.bubblewrap import Bubblewrap
from temper_trainer.environment.protocol import BrokenEnvironmentError
from temper_trainer.environment.python_process import (
    INTERPRETER_FLAGS,
    RUNNER,
    SandboxResult,
    build_resource_limits,
    run_process,
)

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 60.0


class Sandbox(Protocol):
    """Runs programs, several at once from different threads."""

    def run(self, code: str, *, timeout_s: float, memory_mib: int) -> SandboxResult:
        """Run a program to its end and return what it printed.

        Args:
            code: Python source. It may import the standard library.
            timeout_s: Wall-clock time, after which it is killed.
            memory_mib: Limit on the address space of its process.

        Raises:
            BrokenEnvironmentError: If the sandbox could not be started. A program cannot cause
                this.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoSandbox:
    """`environment.sandbox=none`: limits on time, memory and output, and no isolation at all."""

    def run(self, code: str, *, timeout_s: float, memory_mib: int) -> SandboxResult:
        """See Sandbox."""
        limits = build_resource_limits(timeout_s=timeout_s, memory_mib=memory_mib) | {
            "RLIMIT_CORE": 0
        }
        arguments = [f"{name}={value}" for name, value in limits.items()]
        with open_temporary_folder("python") as folder:
            process = run_process(
                [sys.executable, *INTERPRETER_FLAGS, "-c", RUNNER, *arguments],
                stdin=code.encode(errors="replace"),
                timeout_s=timeout_s,
                folder=folder,
                environment={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
                has_watcher=True,
            )
        return process.to_result()


@cache
def open_sandbox(name: SandboxName) -> Sandbox:
    """Return the sandbox of `environment.sandbox`, after one program ran in it; once per process.

    Raises:
        ConfigError: If bubblewrap is not installed or cannot be used here.
    """
    if name == "none":
        logger.warning(
            "environment.sandbox is none: programs that the policy writes run as your user. They "
            "can read and change your files, read your tokens and use the network. Install "
            "bubblewrap and remove the setting, or run the trainer in a container that holds "
            "nothing of value."
        )
        return NoSandbox()
    try:
        sandbox = Bubblewrap.find()
        result = sandbox.run("print(6 * 7)", timeout_s=_PROBE_TIMEOUT_S, memory_mib=256)
    except BrokenEnvironmentError as error:
        raise ConfigError(_refusal(str(error))) from error
    if result.output != "42":
        raise ConfigError(_refusal(f"a first program printed {result.output!r} and not '42'"))
    return sandbox


def _refusal(reason: str) -> str:
    return (
        f"environment.name is python, but its sandbox cannot be started: {reason}. It needs Linux, "
        "bubblewrap 0.8 or newer and libseccomp (apt-get install bubblewrap libseccomp2, or dnf "
        "install bubblewrap libseccomp), and a kernel or container that allows user namespaces. To "
        "run the policy's programs without isolation, as your user, set environment.sandbox=none."
    )
