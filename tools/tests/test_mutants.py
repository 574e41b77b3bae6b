"""Test that faults are planted one at a time where they can matter, and misses are reported."""

from pathlib import Path

import pytest

from tools.mutants import SUBJECTS, Subject, faults, survivors

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Plan:
    size: int

def half(n: int) -> int:
    if n < 0:
        raise ValueError(f"{n - 1} is below 0")
    return n // 2
"""


def test_every_operator_comparison_and_number_is_another_one_once() -> None:
    assert [str(fault) for fault in faults(SOURCE)] == [
        "line 9: `0` became `1`",
        "line 9: `n < 0` became `n <= 0`",
        "line 9: `n < 0` became `not n < 0`",
        "line 11: `2` became `3`",
        "line 11: `n // 2` became `n * 2`",
    ]
    for fault in faults(SOURCE):
        assert fault.source.count("frozen=True") == 1
        assert "n - 1" in fault.source


@pytest.mark.nightly
def test_a_fault_that_no_test_sees_is_told(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "example"
    (package / "src").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "halves.py").write_text(SOURCE)
    (package / "tests" / "test_halves.py").write_text(
        "from halves import half\n\ndef test_four() -> None:\n    assert half(4) == 2\n"
    )
    subject = Subject(package="example", module="halves.py", tests=("test_halves.py",))
    missed, num_tried, num_all = survivors(tmp_path, subject, num_faults=9, seed=0)
    # A test of only 4 notices the changed division, its changed number and the negated condition,
    # but neither change of the bound.
    assert [str(fault) for fault in missed] == [
        "line 9: `0` became `1`",
        "line 9: `n < 0` became `n <= 0`",
    ]
    assert (num_tried, num_all) == (5, 5)


def test_tests_that_fail_anyway_say_nothing(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "example"
    (package / "src").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "halves.py").write_text(SOURCE)
    (package / "tests" / "test_halves.py").write_text("def test_it() -> None:\n    assert False\n")
    with pytest.raises(RuntimeError, match="fail without any fault"):
        survivors(
            tmp_path,
            Subject(package="example", module="halves.py", tests=("test_halves.py",)),
            num_faults=1,
            seed=0,
        )


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_core_and_its_tests_are_there(name: str) -> None:
    folder = ROOT / "packages" / SUBJECTS[name].package
    assert (folder / "src" / SUBJECTS[name].module).is_file()
    assert [test for test in SUBJECTS[name].tests if not (folder / "tests" / test).exists()] == []
