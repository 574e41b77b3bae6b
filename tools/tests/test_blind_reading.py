import json
from pathlib import Path

import pytest

from tools import blind_reading

FUNCTION = '''
def add_{number}(first, second):
    """Add two numbers of temper. They may be large."""
    # Sum first, because the caller rounds.
    total = first + second
    if total > 10:
        print("large")
    if total < 0:
        print("small")
    return total
'''


def _write_project(root: Path, *, source: str, pages: str) -> None:
    for number in range(30):
        code = root / source / f"module_{number}.py"
        code.parent.mkdir(parents=True, exist_ok=True)
        functions = "".join(FUNCTION.format(number=each) for each in range(8))
        code.write_text(f"# Copyright\n{functions}")
        page = root / pages / f"page_{number}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("A sentence about Temper here.\n\n" * 30)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    _write_project(tmp_path / "local", source="packages/trainer/src", pages="docs")
    _write_project(tmp_path / "trl", source="trl/core", pages="docs/source")
    out = tmp_path / "sample"
    blind_reading.draw(1, out, local=tmp_path / "local", others=[tmp_path / "trl"])
    return out


def test_projects_give_equal_numbers_of_anonymous_pieces(sample: Path) -> None:
    key = json.loads((sample / "key.json").read_text())
    kinds = [(entry["project"], entry["kind"]) for entry in key]
    expected = {"function": 20, "file": 5, "page": 3}
    for project in ("local", "trl"):
        assert {kind: kinds.count((project, kind)) for kind in expected} == expected
    text = (sample / "pieces.md").read_text()
    assert "temper" not in text.lower()
    assert "Copyright" not in text


def test_function_has_two_sentences_a_comment_and_four_names(sample: Path) -> None:
    key = json.loads((sample / "key.json").read_text())
    function = next(entry for entry in key if entry["kind"] == "function")
    # The summary, the second sentence and the comment; add_N, first, second and total.
    assert (function["sentences"], function["names"]) == (3, 4)


def test_fractions_are_counted_by_project(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = json.loads((sample / "key.json").read_text())
    entry = next(each for each in key if each["project"] == "local")
    answers = sample / "answers.json"
    answers.write_text(json.dumps([{"piece": entry["piece"], "kind": "name", "text": "total"}]))
    blind_reading.count(sample, answers)
    rows = capsys.readouterr().out.splitlines()
    total = sum(entry["names"] for entry in key if entry["project"] == "local")
    assert rows[2].endswith(f"| {total} | 1 | {1 / total:.1%} |")
    assert rows[3].endswith("| 0 | 0.0% |")
