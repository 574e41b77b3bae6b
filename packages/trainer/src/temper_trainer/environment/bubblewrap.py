"""Run Python programs in bubblewrap: new namespaces with only the interpreter and a temp folder."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from temper_trainer.environment.protocol import BrokenEnvironmentError
from temper_trainer.environment.python_process import (
    INTERPRETER_FLAGS,
    MAX_FILE_BYTES,
    MAX_THREADS,
    RUNNER,
    SandboxResult,
    build_resource_limits,
    run_process,
)
from temper_trainer.environment.sandbox_supervisor import Limits, read_status
from temper_trainer.environment.seccomp_filter import build_seccomp_filter
from temper_trainer.environment.supervisor_process import open_supervisor

FOLDER = "/tmp"
"""The program's own folder, empty at its start, in memory and gone at its end."""
MAX_FILES = 4096
"""Largest number of files in FOLDER. tmpfs has a mount option for this, but bubblewrap cannot set
it, so the supervisor counts them.
"""
UNPRIVILEGED_ID = 65534
"""User and group of the program where the trainer runs as root."""

_NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL", "--hostname", "sandbox"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SCREEN_MODULES = ("_tkinter", "_curses", "readline", "nis", "_dbm", "_gdbm")
"""Extension modules whose libraries are left out: there is no screen, keyboard or name service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Files of the interpreter that runs the trainer, without third-party packages."""

    executable: str
    folders: tuple[str, ...]
    """Folders of the standard library, which programs can read."""
    libraries: tuple[str, ...]
    """Shared libraries that the loader finds for the executable and the extension modules."""
    hidden: tuple[str, ...]
    """Folders inside `folders` that hold third-party packages."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files of the interpreter that a program can see."""
        return (self.executable, *self.folders, *self.libraries)

    @classmethod
    def find(cls) -> "Interpreter":
        """Find the files of the interpreter by running it, and its libraries with ldd."""
        # In a virtual environment, the interpreter that it was made from, which has all the files.
        executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        search_path = _run_and_read(
            [executable, *INTERPRETER_FLAGS, "-c", "import sys; print(*sys.path, sep='\\n')"]
        )
        listed = [
            os.path.normpath(path) for path in search_path.splitlines() if os.path.exists(path)
        ]
        folders = [
            path for path in listed if not any(path.startswith(f"{other}/") for other in listed)
        ]
        modules = [
            str(module)
            for folder in listed
            if os.path.isdir(folder)
            for module in Path(folder).glob("*.so")
            if not module.name.startswith(_SCREEN_MODULES)
        ]
        # A line of ldd is "name => path (address)", or "path (address)" for the loader itself.
        library_paths = re.findall(
            r"(?:=> |^\s+)(/.*) \(0x[0-9a-f]+\)$",
            _run_and_read(["ldd", executable, *modules]),
            re.M,
        )
        packages = (
            os.path.join(folder, name)
            for folder in folders
            for name in ("site-packages", "dist-packages")
        )
        return cls(
            executable=executable,
            folders=tuple(folders),
            libraries=tuple(sorted({os.path.normpath(path) for path in library_paths})),
            hidden=tuple(path for path in packages if os.path.isdir(path)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """Runs each program in new namespaces of all kinds, below a filter of system calls.

    The program sees the files of the interpreter, read-only, three devices, and its folder. There
    is no /proc, no network, no other process, and no environment: /proc/1/environ could not show a
    secret even if it were mounted, since bubblewrap itself starts with an empty environment.

    If the trainer runs as root, an outer bubblewrap starts the same sandbox as UNPRIVILEGED_ID: see
    `build_unprivileged_options`.
    """

    outer: tuple[str, ...]
    """Command line of the outer bubblewrap if the trainer runs as root; otherwise empty."""
    inner: tuple[str, ...]
    """Command line of the bubblewrap that starts the program."""
    program: tuple[str, ...]
    """The interpreter and its options."""
    filter: bytes
    """A seccomp filter; see `build_seccomp_filter`."""

    @classmethod
    def find(cls) -> "Bubblewrap":
        """Return a sandbox for the interpreter that runs this function.

        Raises:
            BrokenEnvironmentError: If a program that it needs is not installed.
        """
        bwrap = _find_program("bwrap")
        interpreter = Interpreter.find()
        command = [
            # A core dump may go to a program of the host, which a limit of 0 does not prevent; 1
            # does, see core(5). The filter keeps the program from lowering it.
            *(_find_program("prlimit"), "--core=1:1"),
            *(bwrap, *_NAMESPACES, "--setenv", "HOME", FOLDER),
        ]
        if folders := sorted({os.path.dirname(path) for path in interpreter.libraries}):
            # There is no cache of the loader in the sandbox.
            command += ["--setenv", "LD_LIBRARY_PATH", ":".join(folders)]
        for path in interpreter.paths:
            command += ["--ro-bind", path, path]
        for path in interpreter.hidden:
            command += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        for path in _DEVICES:
            command += ["--dev-bind", path, path]
        command += [
            "--size",
            str(MAX_FILE_BYTES),
            "--tmpfs",
            FOLDER,
            "--chdir",
            FOLDER,
            "--remount-ro",
            "/",
        ]
        is_root = os.geteuid() == 0
        return cls(
            outer=(bwrap, *build_unprivileged_options((bwrap, *interpreter.paths)))
            if is_root
            else (),
            inner=(*build_unprivileged_command(), *command) if is_root else tuple(command),
            program=("--", interpreter.executable, *INTERPRETER_FLAGS, "-c", RUNNER),
            filter=build_seccomp_filter(),
        )

    def run(self, code: str, *, timeout_s: float, memory_mib: int) -> SandboxResult:
        """See Sandbox."""
        # Set inside the sandbox: in a user namespace of its own, processes of other calls do not
        # count.
        limits = build_resource_limits(timeout_s=timeout_s, memory_mib=memory_mib) | {
            "RLIMIT_NPROC": MAX_THREADS
        }
        with ExitStack() as stack:
            filter_file, status_file = (
                stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)
            )
            # Pass no other descriptors. bubblewrap closes only the descriptors in its options, so
            # the program would inherit all others.
            status_files, command = [status_file], list(self.inner)
            filter_file.write(self.filter)
            filter_file.seek(0)
            command += [
                "--seccomp",
                str(filter_file.fileno()),
                "--json-status-fd",
                str(status_file.fileno()),
            ]
            command += [*self.program, *(f"{name}={value}" for name, value in limits.items())]
            if self.outer:
                status_files.insert(0, stack.enter_context(tempfile.TemporaryFile()))
                command = [
                    *self.outer,
                    "--json-status-fd",
                    str(status_files[0].fileno()),
                    "--",
                    *command,
                ]
            process = run_process(
                command,
                stdin=code.encode(errors="replace"),
                timeout_s=timeout_s,
                pass_fds=[file.fileno() for file in (filter_file, *status_files)],
                watch=partial(
                    open_supervisor().watch,
                    limits=Limits(
                        timeout_s=timeout_s,
                        deadline=time.monotonic() + timeout_s,
                        memory_mib=memory_mib,
                        max_files=MAX_FILES,
                        folder=FOLDER,
                        folder_bytes=MAX_FILE_BYTES,
                    ),
                    status_files=[file.fileno() for file in status_files],
                ),
            )
            # bubblewrap reports a status only if the program was started; the program cannot
            # write there.
            if process.killed is None and "exit-code" not in read_status(status_file.fileno()):
                reason = (
                    process.stderr.decode(errors="replace").strip()
                    or f"status {process.returncode}"
                )
                raise BrokenEnvironmentError(f"bubblewrap could not start the program: {reason}")
        return process.to_result()


def build_unprivileged_command() -> Sequence[str]:
    """Return the command that runs the rest of the command line as UNPRIVILEGED_ID.

    It uses setpriv and not the arguments of Popen: with those, Python forks instead of calling
    vfork, and copies all page tables of the trainer for each program.
    """
    return (
        _find_program("setpriv"),
        f"--reuid={UNPRIVILEGED_ID}",
        f"--regid={UNPRIVILEGED_ID}",
        "--clear-groups",
    )


def build_unprivileged_options(paths: Sequence[str]) -> Sequence[str]:
    """Return the options of an outer bubblewrap, which a trainer that runs as root needs.

    * Another user may not be able to reach the interpreter, such as one in a home directory. Each
      folder without access for other users is replaced by a folder with only `paths`.
    * A root process without capabilities, as bubblewrap is when its parent dies, cannot kill a
      process of another user. But the end of a PID namespace ends all processes in it.
    """
    options = ["--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc"]
    closed = sorted({folder for path in paths if (folder := _find_closed_folder(path)) is not None})
    options += [option for folder in closed for option in ("--perms", "0755", "--tmpfs", folder)]

    def is_inside(path: str) -> bool:
        return any(path.startswith(f"{folder}/") for folder in closed)

    hidden = sorted({os.path.realpath(path) for path in paths if is_inside(os.path.realpath(path))})
    parents = sorted(
        {str(parent) for path in hidden for parent in Path(path).parents if is_inside(str(parent))}
    )
    options += [option for parent in parents for option in ("--perms", "0755", "--dir", parent)]
    options += [option for path in hidden for option in ("--ro-bind", path, path)]
    return options


def _find_closed_folder(path: str) -> str | None:
    """Return the outermost folder above a path that other users may not enter."""
    for parent in reversed(Path(os.path.realpath(path)).parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return str(parent)
    return None


def _find_program(program: str) -> str:
    if (path := shutil.which(program)) is None:
        raise BrokenEnvironmentError(f"the program {program} is not installed")
    return path


def _run_and_read(command: Sequence[str]) -> str:
    try:
        # ldd fails if a library of any module is missing. Only that module can't be imported then.
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError as error:
        raise BrokenEnvironmentError(f"the program {command[0]} is not installed") from error
