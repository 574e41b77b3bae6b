"""Test that steps run, count their tests, are killed in time, and are reported correctly."""

import getpass
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from tools.steps import (
    ENVIRONMENT,
    NIGHTLY_TESTS_OF_THE_KIT,
    NUM_PARALLEL_STEPS,
    STEPS,
    Counts,
    Step,
    compute_total_budget_s,
    count_tests,
    print_report,
    run_in_parallel,
    run_step,
    run_streamed,
)

PYTHON = Path(sys.executable)
ROOT = Path(__file__).resolve().parents[2]


def _step(*programs: str, budget_s: float = 60) -> Step:
    return Step(
        name="example", budget_s=budget_s, commands=tuple(("-c", program) for program in programs)
    )


def _pytest_step(file: Path) -> Step:
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(file.parent),
        "-c",
        "/dev/null",
        str(file),
    )
    return Step(name="example", budget_s=60, commands=(command,), is_pytest=True)


def test_a_step_that_passes_counts_as_one(tmp_path: Path) -> None:
    result = run_step(_step("print('hello')", "pass"), python=PYTHON, root=tmp_path)
    assert (result.failures, result.counts, result.tail) == ((), Counts(passed=1), ("hello",))


def test_tests_that_are_left_to_the_night_exist() -> None:
    kit = ROOT / "packages/engine-api/src/temper_engine_api/conformance/tests"
    sources = "".join(file.read_text() for file in kit.glob("test_*.py"))
    for name in NIGHTLY_TESTS_OF_THE_KIT:
        assert f"{name.partition('[')[0]}(" in sources, name


@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("3", "3")])
def test_steps_compute_on_one_thread_unless_the_caller_chooses(
    chosen: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    program = "import os; print(os.environ['OMP_NUM_THREADS'])"
    result = run_step(_step(program), python=PYTHON, root=tmp_path)
    assert result.tail == (expected,)


def test_steps_write_bytecode_whatever_the_caller_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = "import sys; print(sys.dont_write_bytecode)"
    assert run_step(_step(program), python=PYTHON, root=tmp_path).tail == ("False",)


def test_later_commands_run_after_a_failing_one(tmp_path: Path) -> None:
    result = run_step(_step("raise SystemExit(3)", "print('second')"), python=PYTHON, root=tmp_path)
    assert result.failures == ("failed with exit status 3",)
    assert result.counts == Counts(failed=1)
    assert result.tail == ("second",)


def test_pytest_is_counted_test_by_test(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): pass\n"
        "def test_c(): assert False\n"
        "@pytest.mark.skip(reason='no')\n"
        "def test_d(): pass\n"
    )
    result = run_step(_pytest_step(file), python=PYTHON, root=tmp_path)
    assert result.counts == Counts(passed=2, failed=1, skipped=1)
    assert result.failures == ("failed with exit status 1",)


def test_a_pytest_run_without_tests_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text("")
    result = run_step(_pytest_step(file), python=PYTHON, root=tmp_path)
    assert result.failures == ("failed: no test was found",)
    assert result.counts == Counts(failed=1)


def test_a_pytest_run_that_dies_counts_as_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text("import os\ndef test_a(): os._exit(9)\n")
    result = run_step(_pytest_step(file), python=PYTHON, root=tmp_path)
    assert result.counts == Counts(failed=1)


def test_pytest_passes_if_a_parallel_step_removes_the_same_old_folder(tmp_path: Path) -> None:
    """Each session of pytest removes old folders of all sessions when it ends."""
    (tmp_path / "test_one.py").write_text("def test_one(tmp_path): ...\n")
    (tmp_path / "meets_another_session.py").write_text(
        "import errno, os\n"
        "real_rmdir = os.rmdir\n"
        "def rmdir(path, *args, **kwargs):\n"
        "    if 'garbage-' in str(path):\n"
        "        raise OSError(errno.ENOTEMPTY, 'Directory not empty', path)\n"
        "    real_rmdir(path, *args, **kwargs)\n"
        "os.rmdir = rmdir\n"
    )
    user = getpass.getuser()
    garbage = tmp_path / f"pytest-of-{user}" / "garbage-1"
    garbage.mkdir(parents=True)
    garbage.parent.chmod(0o700)
    run = subprocess.run(
        (
            *(sys.executable, "-m", "pytest", "-q", "-p", "meets_another_session"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "test_one.py"),
        ),
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert list(garbage.parent.glob("garbage-*")), "the folder was removed"
    assert run.returncode == 0, run.stdout + run.stderr


def test_nested_suites_are_added_up() -> None:
    xml = (
        '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/>'
        '<testsuite tests="2"/></testsuites>'
    )
    assert count_tests(xml) == Counts(passed=4, failed=2, skipped=1)  # 5 - 1 - 1 - 1 + 2; 1 + 1; 1


def test_step_far_over_its_budget_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    result = run_step(_step(program, budget_s=0.5), python=PYTHON, root=tmp_path)
    assert 5 <= time.monotonic() - started < 25
    assert result.failures == ("killed after 0:05, 10 times its budget",)
    assert _is_gone(int(result.tail[0]))


def test_steps_run_in_parallel_and_results_keep_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"step-{number}" for number in range(NUM_PARALLEL_STEPS)]
    # Each step waits for files that the others write: in sequence the first would never end.
    program = (
        "import pathlib, sys, time\n"
        "pathlib.Path({name!r}).touch()\n"
        f"while not all(pathlib.Path(name).exists() for name in {names}): time.sleep(0.01)\n"
        "print('met')\n"
    )
    steps = [
        Step(name=name, budget_s=6 + number, commands=(("-c", program.format(name=name)),))
        for number, name in enumerate(names)
    ]
    results = run_in_parallel(steps, python=PYTHON, root=tmp_path)
    assert [(result.step.name, result.failures, result.tail) for result in results] == [
        (name, (), ("met",)) for name in names
    ]
    assert {f"{name} | met" for name in names} <= set(capsys.readouterr().out.splitlines())


def test_interrupted_run_kills_the_processes_of_its_steps(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys, threading, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.steps import Step, run_in_parallel\n"
        # In a shell's background job Ctrl-C is ignored, and child processes inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "child = 'import os, pathlib, time; '"
        "'pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(60)'\n"
        "def interrupt():\n"
        "    while not pathlib.Path('pid').exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "steps = [\n"
        "    Step(name='waits', budget_s=60, commands=(('-c', child),)),\n"
        "    Step(name='later', budget_s=1, commands=(('-c', 'pass'),)),\n"
        "]\n"
        "run_in_parallel(steps, python=pathlib.Path(sys.executable), root=pathlib.Path('.'))\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert time.monotonic() - started < 20
    assert _is_gone(int((tmp_path / "pid").read_text()))


def test_processes_left_running_by_a_step_are_killed(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(subprocess.Popen(child).pid)\n"
    )
    tail = deque[str]()
    started = time.monotonic()
    assert (
        run_streamed(
            [sys.executable, "-c", program], cwd=tmp_path, tail=tail, limit_s=30, name="example"
        )
        == 0
    )
    assert time.monotonic() - started < 20
    assert _is_gone(int(tail[0]))


def test_last_line_counts_all_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = run_step(_step("pass"), python=PYTHON, root=tmp_path)
    bad = run_step(_step("print('the reason'); raise SystemExit(1)"), python=PYTHON, root=tmp_path)
    capsys.readouterr()
    print_report([good, bad], took_s=3.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert "the reason" in lines
    assert [line.split(" | ")[0].strip() for line in lines if " | " in line] == [
        "step",
        "example",
        "example",
        "all",
    ]


def test_total_budget_is_below_twenty_minutes() -> None:
    assert compute_total_budget_s((ENVIRONMENT, *STEPS)) < 20 * 60


def _is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    for _ in range(50):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        if not state.strip() or state.startswith("Z"):
            return True
        time.sleep(0.1)
    return False
