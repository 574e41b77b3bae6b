"""Test that faults are planted one at a time where they can matter, and misses are reported."""

from pathlib import Path

import pytest

from tools.mutants import TARGETS, MutationTarget, find_unnoticed_faults, list_faults, main

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


def test_every_operator_comparison_and_number_is_changed_once() -> None:
    assert [str(fault) for fault in list_faults(SOURCE)] == [
        "line 9: `0` became `1`",
        "line 9: `n < 0` became `n <= 0`",
        "line 9: `n < 0` became `not n < 0`",
        "line 11: `2` became `3`",
        "line 11: `n // 2` became `n * 2`",
    ]
    for fault in list_faults(SOURCE):
        assert fault.source.count("frozen=True") == 1
        assert "n - 1" in fault.source


# Nightly: runs pytest once for each fault.
@pytest.mark.nightly
def test_unnoticed_fault_is_reported(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "example"
    (package / "src").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "halves.py").write_text(SOURCE)
    (package / "tests" / "test_halves.py").write_text(
        "from halves import half\n\ndef test_four() -> None:\n    assert half(4) == 2\n"
    )
    target = MutationTarget(package="example", module="halves.py", tests=("test_halves.py",))
    missed, num_tried, num_all = find_unnoticed_faults(tmp_path, target, num_faults=9, seed=0)
    # A test of only 4 notices the changed division, its changed number and the negated condition,
    # but neither change of the bound.
    assert [str(fault) for fault in missed] == [
        "line 9: `0` became `1`",
        "line 9: `n < 0` became `n <= 0`",
    ]
    assert (num_tried, num_all) == (5, 5)


def test_tests_that_fail_without_a_fault_are_refused(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "example"
    (package / "src").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "halves.py").write_text(SOURCE)
    (package / "tests" / "test_halves.py").write_text("def test_it() -> None:\n    assert False\n")
    with pytest.raises(RuntimeError, match="fail without any fault"):
        find_unnoticed_faults(
            tmp_path,
            MutationTarget(package="example", module="halves.py", tests=("test_halves.py",)),
            num_faults=1,
            seed=0,
        )


def test_unknown_target_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense", "--faults", "1"])
    assert "nonsense: expected reduction, plan, translator" in capsys.readouterr().err


@pytest.mark.parametrize("name", TARGETS)
def test_target_modules_and_their_tests_exist(name: str) -> None:
    folder = ROOT / "packages" / TARGETS[name].package
    assert (folder / "src" / TARGETS[name].module).is_file()
    assert [test for test in TARGETS[name].tests if not (folder / "tests" / test).exists()] == []
