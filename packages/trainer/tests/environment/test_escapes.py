"""Run programs that try to leave the sandbox of the Python tool, as root and as another user."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from packages.trainer.tests.environment.attempts_for_tests import ATTEMPTS, PRELUDE, Attempt
from temper_trainer.environment.bubblewrap import (
    build_unprivileged_command,
    build_unprivileged_options,
)
from temper_trainer.environment.python_process import SandboxResult
from temper_trainer.environment.sandbox import NoSandbox

SECRET = "sentinel-4f1c-of-a-token"
IS_ROOT = os.geteuid() == 0
WORKER = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from temper_trainer.environment.bubblewrap import Bubblewrap
sandbox = Bubblewrap.find()
with ThreadPoolExecutor(16) as pool:
    print(json.dumps([asdict(result) for result in pool.map(lambda program: sandbox.run(**program), json.load(sys.stdin))]))
"""
"""Runs programs sixteen at a time, as the trainer does."""

RunAll = Callable[[Sequence[str], float], list[SandboxResult]]
Results = dict[str, SandboxResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The targets of the programs. Every user of this host can reach them."""

    folder: str
    manifest: str
    secret_file: str
    socket: str
    abstract: str
    port: int
    pid: int
    packages: str
    nap: str
    """Seconds of a sleep that no other process of this machine takes."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        folder.chmod(0o777)
        (folder / "manifest.json").write_text("{}")
        (folder / "secret").write_text(SECRET)
        for file in folder.iterdir():
            file.chmod(0o666)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        named.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0temper-{os.getpid()}")
        for server in (named, abstract):
            server.listen()
        yield Host(
            folder=str(folder),
            manifest=str(folder / "manifest.json"),
            secret_file=str(folder / "secret"),
            socket=str(folder / "socket"),
            abstract=f"temper-{os.getpid()}",
            port=listener.getsockname()[1],
            pid=os.getpid(),
            packages=str(Path(pytest.__file__).parents[1]),
            nap=str(10_000_000 + os.getpid()),
        )


@pytest.fixture(scope="module", params=["as root", "unprivileged"])
def run_all(request: pytest.FixtureRequest, needs_bubblewrap: None) -> RunAll:
    """Run programs in a sandbox that this user starts, whose environment holds a secret."""
    if request.param == "as root" and not IS_ROOT:
        pytest.skip("needs a session of root")
    command = [sys.executable, "-c", WORKER]
    if request.param == "unprivileged" and IS_ROOT:
        paths = [
            sys.executable,
            sys.prefix,
            sys.base_prefix,
            *(path for path in sys.path if os.path.exists(path)),
        ]
        command = [
            "bwrap",
            *build_unprivileged_options(paths),
            "--",
            *build_unprivileged_command(),
            *command,
        ]

    def run(codes: Sequence[str], timeout_s: float = 60.0) -> list[SandboxResult]:
        done = subprocess.run(
            command,
            input=json.dumps(
                [{"code": code, "timeout_s": timeout_s, "memory_mib": 256} for code in codes]
            ),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ
            | {"PYTHONPATH": ":".join(sys.path), "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET},
        )
        return [SandboxResult(**result) for result in json.loads(done.stdout)]

    return run


@pytest.fixture(scope="module")
def results(run_all: RunAll, host: Host) -> Results:
    """Run all attempts, and check that the host is unchanged."""
    outcome_by_attempt = {}
    for timeout_s in {attempt.timeout_s for attempt in ATTEMPTS}:
        alike = [
            attempt
            for attempt in ATTEMPTS
            if attempt.timeout_s == timeout_s and is_for_this_machine(attempt)
        ]
        outcomes = run_all([program(attempt, host) for attempt in alike], timeout_s)
        outcome_by_attempt |= {
            attempt.name: result for attempt, result in zip(alike, outcomes, strict=True)
        }
    assert sorted(path.name for path in Path(host.folder).iterdir()) == [
        "manifest.json",
        "secret",
        "socket",
    ]
    assert Path(host.manifest).read_text() == "{}"
    assert host.nap not in _command_lines()
    return outcome_by_attempt


def program(attempt: Attempt, host: Host) -> str:
    return PRELUDE.format(host=asdict(host)) + attempt.code


def is_for_this_machine(attempt: Attempt) -> bool:
    return attempt.machine in ("", platform.machine())


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_no_program_leaves_the_sandbox(attempt: Attempt, results: Results) -> None:
    if not is_for_this_machine(attempt):
        pytest.skip(f"needs a machine of {attempt.machine}")
    output = results[attempt.name].output
    assert "ESCAPED" not in output
    assert SECRET not in output
    assert attempt.says in output
    assert "NameError" not in output
    assert "SyntaxError" not in output


def has_all_capabilities() -> bool:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    sys_chroot, sys_ptrace, sys_admin, sys_nice, net_raw, mknod = 18, 19, 21, 23, 13, 27
    return all(
        int(line.split()[1], 16) >> bit & 1
        for bit in (sys_chroot, sys_ptrace, sys_admin, sys_nice, net_raw, mknod)
    )


def test_same_programs_escape_without_a_sandbox(host: Host, needs_bubblewrap: None) -> None:
    """Check that the programs test what they claim: without a sandbox they succeed."""
    del needs_bubblewrap  # they are written for Linux
    expected = {"escapes", "as root"} if has_all_capabilities() else {"escapes"}
    attempts = [
        attempt
        for attempt in ATTEMPTS
        if attempt.unconfined in expected and is_for_this_machine(attempt)
    ]
    with ThreadPoolExecutor(4) as pool:
        run = partial(NoSandbox().run, timeout_s=60.0, memory_mib=256)
        outcomes = list(pool.map(lambda attempt: run(program(attempt, host)), attempts))
    for name in ("new", "daemon"):
        Path(host.folder, name).unlink(missing_ok=True)
    failed = {
        a.name: result.output
        for a, result in zip(attempts, outcomes, strict=True)
        if "ESCAPED" not in result.output
    }
    assert not failed


def test_program_does_not_see_files_of_an_earlier_one(run_all: RunAll) -> None:
    code = "import os; print(os.listdir('.')); open('left', 'w').write('x')"
    assert [result.output for result in run_all([code] * 20)] == ["[]"] * 20


def test_ordinary_programs_work(run_all: RunAll) -> None:
    code = """
import asyncio, collections, datetime, decimal, hashlib, json, lzma, os, pathlib, random, re, shutil, sqlite3
import statistics, tempfile, threading, uuid
from concurrent.futures import ThreadPoolExecutor

async def add(a, b):
    await asyncio.sleep(0.001)
    return a + b

with ThreadPoolExecutor(4) as pool:
    assert sum(pool.map(lambda x: x * x, range(10))) == 285
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "a.txt")
    path.write_text("text")
    shutil.copy2(path, path.with_name("b.txt"))
    assert path.with_name("b.txt").read_text() == "text"
assert sqlite3.connect(":memory:").execute("select 6 * 7").fetchone() == (42,)
print(asyncio.run(add(40, 2)), len(uuid.uuid4().hex), hashlib.sha256(b"x").hexdigest()[:8], open(os.devnull).read())
"""
    (result,) = run_all([code])
    assert result.output == "42 32 2d711642 "
    assert not result.is_failed


def test_database_in_a_file_needs_no_locks_or_gets_a_clear_error(run_all: RunAll) -> None:
    code = """
import sqlite3
query = "create table t (x)"
try:
    sqlite3.connect("a.db").execute(query)
except sqlite3.OperationalError as error:
    print(error)
sqlite3.connect("file:b.db?nolock=1", uri=True).execute(query)
print("created")
"""
    (result,) = run_all([code])
    assert result.output == "access permission denied\ncreated"


def test_program_ends_if_the_trainer_is_killed(host: Host, needs_bubblewrap: None) -> None:
    del needs_bubblewrap
    limit = int(host.nap)  # a limit that no other process of this machine has marks this one
    driver = (
        "from temper_trainer.environment.bubblewrap import Bubblewrap\n"
        f"Bubblewrap.find().run('import time; time.sleep(100)', timeout_s=100, memory_mib={limit})"
    )
    mark = f"RLIMIT_AS={limit << 20}"
    with subprocess.Popen([sys.executable, "-c", driver]) as trainer:
        # The innermost bubblewrap, the first process of the namespace, and the program.
        # Three interpreters start one after the other, which took over 10 s at load 24.
        is_running = _wait_for(lambda: _command_lines().count(mark) >= 3, timeout_s=60)
        trainer.kill()
    assert is_running
    assert _wait_for(lambda: mark not in _command_lines())


def _wait_for(condition: Callable[[], object], *, timeout_s: float = 10.0) -> object:
    """Return the condition's value once it is true, or what it is after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""


def _command_lines() -> str:
    return "\n".join(_command_line(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
