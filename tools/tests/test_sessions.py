"""What `nox -l` shows reads like a table of contents: read from the noxfile, nothing is run."""

import ast
from pathlib import Path

import pytest

NOXFILE = Path(__file__).resolve().parents[2] / "noxfile.py"
SESSIONS = [
    node
    for node in ast.parse(NOXFILE.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark).startswith("nox.session") for mark in node.decorator_list)
]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.name)
def test_the_line_of_a_session_is_a_whole_sentence(session: ast.FunctionDef) -> None:
    told = (ast.get_docstring(session) or "").partition("\n")[0]
    assert told[:1].isupper(), told
    assert told.endswith("."), f"nox -l shows the first line alone: {told}"
