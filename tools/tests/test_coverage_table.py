"""Test that coverage counts all processes of a run, by package."""

import shutil
import sys
from pathlib import Path

import pytest

from tools.coverage_table import build_coverage_table, clear_coverage, wrap_in_coverage
from tools.steps import Counts, Step, run_in_parallel

PYTHON = Path(sys.executable)
ROOT = Path(__file__).resolve().parents[2]

MODULE = """
def half(n):
    if n < 0:
        raise ValueError(n)
    return n // 2

def twice(n):
    return 2 * n
"""

TESTS = """
import subprocess, sys
sys.path.insert(0, {sources!r})

def run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True)

def test_half():
    import example
    assert example.half(4) == 2

def test_twice_in_another_process():
    done = run(
        "import os, sys; sys.path.insert(0, {sources!r}); import example; "
        "print(example.twice(2), flush=True); os._exit(0)"
    )
    assert (done.stdout, done.stderr) == ("4\\n", "")

def test_process_without_measured_files_prints_no_warning():
    assert run("pass").stderr == ""
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    sources = tmp_path / "packages" / "trainer" / "src"
    sources.mkdir(parents=True)
    (sources / "example.py").write_text(MODULE)
    (sources / "never_imported.py").write_text("a = 1\nb = 2\nc = 3\nd = 4\n")
    (tmp_path / "test_example.py").write_text(TESTS.format(sources=str(sources)))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_coverage_of_all_processes_is_summed_by_package(root: Path) -> None:
    clear_coverage(root)
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(root),
        str(root / "test_example.py"),
    )
    step = Step(name="example", budget_s=60, commands=(command,), is_pytest=True)
    (result,) = run_in_parallel([step], python=PYTHON, root=root, with_coverage=True)
    assert (result.failures, result.counts) == ((), Counts(passed=3))
    # Of example.py 5 of 6 statements ran (two `def`, `if`, two `return`; not `raise`) and one of
    # two branches. Of the other file none of 4 statements ran.
    rows = build_coverage_table(root, python=PYTHON).splitlines()
    assert "| trainer | 10 | 50.0 % | 2 | 50.0 % |" in rows
    assert "| engine-api | 0 | none | 0 | none |" in rows


def test_a_step_without_tests_is_not_measured(root: Path) -> None:
    clear_coverage(root)
    step = Step(
        name="example",
        budget_s=60,
        commands=(("-c", "import sys; print('coverage' in sys.modules)"),),
    )
    (result,) = run_in_parallel([step], python=PYTHON, root=root, with_coverage=True)
    assert result.tail == ("False",)


def test_coverage_of_an_earlier_run_is_deleted(root: Path) -> None:
    clear_coverage(root)
    (root / ".temper" / "coverage" / "all" / "data.old").touch()
    clear_coverage(root)
    assert list((root / ".temper" / "coverage" / "all").iterdir()) == []


def test_coverage_arguments_precede_those_of_the_command(root: Path) -> None:
    arguments = wrap_in_coverage(("-m", "pytest", "-k", "gradient"), root=root)
    assert arguments[:3] == ["-m", "coverage", "run"]
    assert arguments[-4:] == ["-m", "pytest", "-k", "gradient"]
