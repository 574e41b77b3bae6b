"""Test that `nox -l` shows complete sentences, and that a missing Python fails a session."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOXFILE = Path(__file__).resolve().parents[2] / "noxfile.py"
SESSIONS = [
    node
    for node in ast.parse(NOXFILE.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(decorator).startswith("nox.session") for decorator in node.decorator_list)
]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.name)
def test_first_docstring_line_of_a_session_is_a_sentence(session: ast.FunctionDef) -> None:
    first_line = (ast.get_docstring(session) or "").partition("\n")[0]
    assert first_line[:1].isupper(), first_line
    assert first_line.endswith("."), f"nox -l shows only the first line: {first_line}"


def test_missing_python_fails_the_session(tmp_path: Path) -> None:
    other = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
    command = [sys.executable, "-m", "nox", "-f", str(NOXFILE), "--envdir", str(tmp_path / "nox")]
    # Hide all Pythons that nox could find through the path or the home directory.
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYENV")} | {
        "PATH": "/nonexistent",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [*command, "-s", f"pythons-{other}(package='engine-api')"],
        env=bare,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert f"Python interpreter {other} not found" in done.stderr
