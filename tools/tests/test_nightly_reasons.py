"""Each nightly mark has a comment that says why no pull request runs the test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def list_unexplained(source: str) -> list[int]:
    """Return the lines of nightly marks without a comment in which "nightly" occurs.

    The comment is directly above the statement of the module that has the mark, or inside it. A
    comment in the body of a marked test does not count.
    """
    lines = source.splitlines()
    unexplained = []
    for statement in ast.parse(source).body:
        marks = _list_marks(statement)
        decorators = getattr(statement, "decorator_list", [])
        begin = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
        # A test is marked by a decorator; a helper that returns parameters has marks in its body.
        is_test = (
            isinstance(statement, ast.FunctionDef) and max(marks, default=0) < statement.lineno
        )
        end = statement.lineno if is_test else statement.end_lineno
        while begin > 0 and lines[begin - 1].startswith("#"):
            begin -= 1
        comments = [line.partition("#")[2].lower() for line in lines[begin:end]]
        if not any("nightly" in comment for comment in comments):
            unexplained += marks
    return unexplained


def _list_marks(statement: ast.stmt) -> list[int]:
    """Return the lines of `pytest.mark.nightly` in a statement."""
    return [
        node.lineno
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
        and node.attr == "nightly"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    ]


@pytest.mark.parametrize(
    ("source", "unexplained"),
    [
        ("@pytest.mark.nightly\ndef test(): pass\n", [1]),
        ("# Nightly: starts four servers.\n@pytest.mark.nightly\ndef test(): pass\n", []),
        ("@pytest.mark.nightly  # nightly: starts Ray\ndef test(): pass\n", []),
        ("@pytest.mark.nightly\ndef test():\n    # Nightly: too late.\n    pass\n", [1]),
        ("# Nightly: another.\nx = 1\npytestmark = pytest.mark.nightly\n", [3]),
        ("pytestmark = [\n    # Nightly: minutes.\n    pytest.mark.nightly,\n]\n", []),
        ("def mark(name):\n    return pytest.mark.nightly\n", [2]),
    ],
)
def test_reason_is_a_comment_at_the_statement_of_the_mark(
    source: str, unexplained: list[int]
) -> None:
    assert list_unexplained(source) == unexplained


def test_each_nightly_mark_has_a_reason() -> None:
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tools/tests/*.py")]
    marks = {
        f"{path.relative_to(ROOT)}:{line}": "say in a comment, Nightly: ..., why"
        for path in files
        for line in list_unexplained(path.read_text())
    }
    assert marks == {}
