"""Python code in a process of its own: bounded in time, memory and output, without network, files to write or further processes.

The bounds hold back accidents and curiosity of a model. They are no wall against an attacker: for code from strangers run the whole
trainer in a container without network.
"""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

MAX_OUTPUT_BYTES = 1 << 16
"""Output that is read; the rest is dropped."""

_RUNNER = """
import resource, sys
cpu_s, memory_bytes, max_output = (int(word) for word in sys.argv[1:4])
code = sys.stdin.read()
for limit, value in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, max_output),
                     (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
# Imported before the hook, since importing opens files.
import collections, datetime, decimal, fractions, functools, itertools, json, math, random, re, statistics, string  # noqa
BLOCKED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill",
           "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
           "shutil.", "ctypes.", "os.putenv", "os.listdir", "os.scandir", "glob.", "webbrowser.", "resource.", "signal.", "pty.")
LIBRARY = tuple(path for path in sys.path if path)

def refuse(event, arguments):
    if event.startswith(BLOCKED):
        raise PermissionError("not allowed in the sandbox: " + event)
    if event == "open":
        name, mode = arguments[0], arguments[1]
        is_read = mode is None or not set(str(mode)) & set("wax+")
        if not (is_read and str(name).startswith(LIBRARY)):
            raise PermissionError("not allowed in the sandbox: opening " + str(name))

sys.addaudithook(refuse)
del sys.modules["resource"], resource
exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What a run left."""

    output: str
    """What it printed, then the last line of its error where there was one."""
    is_timeout: bool
    """Whether it was ended for its time."""
    is_failed: bool
    """Whether it raised or was ended."""


def run_python(code: str, *, timeout_s: float, memory_mib: int) -> SandboxResult:
    """Run code and return what it printed.

    Args:
        code: a Python program; the standard library's pure modules are there.
        timeout_s: wall time, after which its whole process group is ended.
        memory_mib: address space.
    """
    arguments = [str(max(1, int(timeout_s) + 1)), str(memory_mib << 20), str(MAX_OUTPUT_BYTES)]
    with tempfile.TemporaryDirectory(prefix="temper-sandbox-") as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _RUNNER, *arguments],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        is_timeout = False
        try:
            process.communicate(code.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            is_timeout = True
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        output, error = (_read(file) for file in (out, err))
    last = error.strip().splitlines()[-1:] if process.returncode else []
    text = "\n".join(part for part in (output.rstrip("\n"), *last) if part)
    return SandboxResult(output=text, is_timeout=is_timeout, is_failed=process.returncode != 0)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode("utf-8", errors="replace")
