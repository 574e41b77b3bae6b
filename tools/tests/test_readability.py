"""Test the counts that docs/records/readability.md shows."""

import sys
from pathlib import Path

import pytest

from tools.readability import OPERATIONS, Recorder, count_statements, operation_table

SOURCE = """
def rl_step(n):
    return helper(n)


def helper(n):
    return n + 1


def unrelated():
    return 0
"""


def test_docstrings_are_not_counted_as_statements(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""Text."""\n\nx = 1\n"""Field."""\n\n\ndef f():\n    """Text."""\n    return x\n'
    )
    assert count_statements(tmp_path) == 3  # x = 1, def, return


def test_only_the_chosen_call_is_recorded_with_everything_it_calls(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    names: dict[str, object] = {}
    exec(compile(SOURCE, str(file), "exec"), names)
    recorder = Recorder(source_root=str(tmp_path))
    title = "one GRPO step (the second)"
    sys.setprofile(recorder)
    try:
        names["rl_step"](1)  # type: ignore[operator]
        after_first = dict(recorder.executed)
        names["rl_step"](1)  # type: ignore[operator]
        names["unrelated"]()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    assert after_first == {}
    assert {code.co_qualname for code in recorder.executed[title]} == {"rl_step", "helper"}


def test_the_table_counts_files_by_package(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "packages" / name / "src").mkdir(parents=True)
    first, second = (str(tmp_path / "packages" / name / "src" / "a.py") for name in ("one", "two"))
    executed = {each.title: [(first, "f"), (first, "g"), (second, "h")] for each in OPERATIONS}
    assert f"| {OPERATIONS[0].title} | 2 | 3 | 1 | 1 |" in operation_table(executed, tmp_path)


# Nightly: runs the quickstart under a profiler.
@pytest.mark.nightly
def test_the_quickstart_calls_every_operation() -> None:
    from tools.readability import ROOT, profile_quickstart

    assert profile_quickstart(ROOT).keys() == {each.title for each in OPERATIONS}
