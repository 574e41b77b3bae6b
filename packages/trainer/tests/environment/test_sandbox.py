"""Test the properties of both sandboxes of the Python tool, and when a run is refused."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from packages.trainer.tests.environment.attempts_for_tests import PAGE_TABLES, PRELUDE
from packages.trainer.tests.process_groups_for_tests import check_group_ids, needs_waitid
from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment import python_process
from temper_trainer.environment.bubblewrap import Bubblewrap
from temper_trainer.environment.protocol import BrokenEnvironmentError
from temper_trainer.environment.python_process import SandboxResult
from temper_trainer.environment.sandbox import NoSandbox, Sandbox, open_sandbox
from temper_trainer.environment.supervisor_process import open_supervisor
from temper_trainer.environment.tool_environment import make_python_tool


@pytest.fixture(params=["bubblewrap", "none"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "none":
        return NoSandbox()
    request.getfixturevalue("needs_bubblewrap")
    return open_sandbox("bubblewrap")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let open_sandbox look at the machine again."""
    open_sandbox.cache_clear()
    yield
    open_sandbox.cache_clear()


def test_output_of_a_program_is_returned(sandbox: Sandbox) -> None:
    result = sandbox.run("import math\nprint(math.gcd(12, 18))", timeout_s=30.0, memory_mib=256)
    assert (result.output, result.is_failed, result.is_timeout) == ("6", False, False)


def test_last_line_of_an_error_is_returned(sandbox: Sandbox) -> None:
    result = sandbox.run("print(1)\nprint(1 / 0)", timeout_s=30.0, memory_mib=256)
    assert result.output == "1\nZeroDivisionError: division by zero"
    assert result.is_failed


def test_silent_exit_is_described_by_its_status(sandbox: Sandbox) -> None:
    result = sandbox.run("raise SystemExit(3)", timeout_s=30.0, memory_mib=256)
    assert result.output == "error: the program ended with status 3"


def test_endless_loop_times_out(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "print('begun', flush=True)\nwhile True: pass", timeout_s=1.0, memory_mib=256
    )
    assert result.is_timeout
    assert result.output == "begun\nerror: no result within 1 s"


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert (
        "MemoryError"
        in sandbox.run("x = bytearray(1 << 30)", timeout_s=30.0, memory_mib=128).output
    )


def test_output_is_bounded(sandbox: Sandbox) -> None:
    result = sandbox.run("while True: print('x' * 1000)", timeout_s=30.0, memory_mib=256)
    assert result.output.endswith("x\nerror: more than 65536 bytes of output")
    assert len(result.output) < 66_000
    assert not result.is_timeout


def test_program_longer_than_a_pipe_buffer_runs(sandbox: Sandbox) -> None:
    code = f"text = {'x' * 500_000!r}\nprint(len(text))"
    assert sandbox.run(code, timeout_s=30.0, memory_mib=256).output == "500000"


def test_unpaired_surrogate_is_printed_as_a_question_mark(sandbox: Sandbox) -> None:
    assert sandbox.run("print('\ud800')", timeout_s=30.0, memory_mib=256).output == "?"


def test_calls_leak_no_descriptor_and_no_process(sandbox: Sandbox) -> None:
    def usage() -> tuple[int, str]:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
        return len(os.listdir("/proc/self/fd")), children

    before = usage()
    for code in (
        "print(1)",
        "1 / 0",
        "import os; os.closerange(0, 9); os._exit(1)",
        "while True: print(1)",
    ):
        sandbox.run(code, timeout_s=30.0, memory_mib=256)
    assert usage() == before


def test_program_does_not_inherit_environment_variables(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sentinel")
    result = sandbox.run("import os; print(sorted(os.environ))", timeout_s=30.0, memory_mib=256)
    assert "HOME" in result.output
    assert "HF_TOKEN" not in result.output


def test_without_a_sandbox_processes_of_the_group_end_with_the_program() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    pid = int(NoSandbox().run(code, timeout_s=30.0, memory_mib=256).output)
    deadline = time.monotonic() + 10
    while (is_there := Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)  # killed, but init may not have taken notice yet
    assert not is_there


DRIVER = """
import sys
from temper_trainer.environment.python_process import SandboxResult
from temper_trainer.environment.sandbox import NoSandbox
NoSandbox().run(sys.stdin.read(), timeout_s=600.0, memory_mib=256)
"""


def test_without_a_sandbox_a_sleeping_program_and_its_processes_end_with_a_killed_driver(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pids"
    code = f"""
import os, subprocess, time
child = subprocess.Popen(["sleep", "1000"])
with open({str(pid_file)!r} + ".partial", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename({str(pid_file)!r} + ".partial", {str(pid_file)!r})
time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        driver.stdin.write(code)
        driver.stdin.close()
        while not pid_file.exists():
            assert driver.poll() is None
            time.sleep(0.05)
        driver.kill()
    left = [Path(f"/proc/{pid}") for pid in pid_file.read_text().split()]
    deadline = time.monotonic() + 10
    while any(path.exists() for path in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path for path in left if path.exists()] == []


@needs_waitid
@pytest.mark.parametrize("code", ["print(1)", "while True: pass"])
def test_without_a_sandbox_the_group_of_a_program_is_killed_before_its_id_is_free(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    killed = check_group_ids(monkeypatch, python_process)
    NoSandbox().run(code, timeout_s=1.0, memory_mib=256)
    assert len(killed) == 1


def test_without_a_sandbox_the_folder_of_a_program_names_its_owner_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    result = NoSandbox().run("import os; print(os.getcwd())", timeout_s=30.0, memory_mib=256)
    # So that the next start removes it if this process is killed.
    assert Path(result.output).name.startswith(f"temper-python-{os.getuid()}-{os.getpid()}-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("needs_bubblewrap")
def test_program_cannot_lock_the_files_of_the_interpreter() -> None:
    code = "import fcntl, os\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)"
    result = open_sandbox("bubblewrap").run(code, timeout_s=30.0, memory_mib=256)
    assert result.is_failed
    assert "Function not implemented" in result.output


def test_timeout_is_reported_to_the_policy(sandbox: Sandbox) -> None:
    tool = make_python_tool(EnvironmentConfig(name="python", tool_timeout_s=0.5), sandbox)
    assert tool("print('x', flush=True)\nwhile True: pass") == (
        "error: no result within 0.5 s",
        True,
    )


def test_without_bubblewrap_the_python_tool_is_refused(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del fresh
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        open_sandbox("bubblewrap")
    assert str(caught.value).startswith(
        "environment.name is python, but its sandbox cannot be started: the program bwrap is not "
        "installed. It needs Linux, bubblewrap"
    )
    assert "apt-get install bubblewrap" in str(caught.value)
    assert str(caught.value).endswith("set environment.sandbox=none.")


def test_failing_sandbox_raises_instead_of_failing_the_program(needs_bubblewrap: None) -> None:
    del needs_bubblewrap
    bubblewrap = Bubblewrap.find()
    broken = replace(bubblewrap, inner=(*bubblewrap.inner, "--bind", "/nowhere", "/nowhere"))
    with pytest.raises(
        BrokenEnvironmentError, match=r"bubblewrap could not start the program: bwrap: .*/nowhere"
    ):
        broken.run("print(1)", timeout_s=30.0, memory_mib=256)


def test_missing_sandbox_is_warned_about_once(
    fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    del fresh
    with caplog.at_level(logging.WARNING):
        open_sandbox("none")
        open_sandbox("none")
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "environment.sandbox is none: programs that the policy writes run as your user."
    )


def test_sandbox_setting_is_refused_without_the_python_tool() -> None:
    with pytest.raises(
        ConfigError,
        match=r"environment\.sandbox is none, but only the environment python uses it, not calculator",
    ):
        EnvironmentConfig(name="calculator", sandbox="none")


def run_while_the_interpreter_is_busy(code: str, *, timeout_s: float) -> SandboxResult:
    """Run a program that waits 0.5 s, and hold the GIL for 2.5 s from then on."""
    sandbox = open_sandbox("bubblewrap")
    # PyDLL keeps the GIL during the call, as a long match of a regular expression does.
    holder = threading.Timer(0.2, ctypes.PyDLL(None).usleep, [2_500_000])
    holder.start()
    result = sandbox.run(
        f"import time\ntime.sleep(0.5)\n{code}", timeout_s=timeout_s, memory_mib=64
    )
    holder.join()
    return result


@pytest.mark.usefixtures("needs_bubblewrap")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a machine of x86_64")
def test_limit_on_page_tables_holds_while_the_trainer_holds_the_gil() -> None:
    # It waits before it reports, so that a machine with many other processes has time to notice.
    fewer = PAGE_TABLES.replace("58000", "7500").replace("escaped(", "time.sleep(1)\nescaped(")
    code = PRELUDE.format(host={}) + fewer
    result = run_while_the_interpreter_is_busy(code, timeout_s=30.0)
    assert result.output == "error: more than 64 MiB of memory"


@pytest.mark.usefixtures("needs_bubblewrap")
def test_limit_on_time_holds_while_the_trainer_holds_the_gil() -> None:
    code = "begin = time.monotonic()\nwhile True: print(time.monotonic() - begin, flush=True); time.sleep(0.1)"
    result = run_while_the_interpreter_is_busy(code, timeout_s=1.0)
    *times, error = result.output.splitlines()
    assert error == "error: no result within 1 s"
    assert float(times[-1]) < 1.0


@pytest.mark.usefixtures("needs_bubblewrap")
def test_end_of_the_supervisor_ends_the_call_and_the_next_call_starts_another() -> None:
    sandbox = open_sandbox("bubblewrap")
    supervisor = open_supervisor()
    killer = threading.Timer(0.5, supervisor.close)
    killer.start()
    with pytest.raises(BrokenEnvironmentError, match="supervisor of the sandbox has ended"):
        sandbox.run("import time; time.sleep(60)", timeout_s=60.0, memory_mib=64)
    killer.join()
    assert sandbox.run("print(1)", timeout_s=30.0, memory_mib=64).output == "1"
    assert open_supervisor() is not supervisor
