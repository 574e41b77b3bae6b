"""Test that docs/records/renames.md leads to names that exist.

A reader who follows a name of an earlier commit must not end at an intermediate name. Names are
searched as words in the sources, because a row may name an attribute, a metric or an argument.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.equal_numbers import RENAMES
from tools.git_changes import list_files

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".toml", ".yaml", ".yml")


def _read_words() -> set[str]:
    """Return the words of all sources and of their paths."""
    words: set[str] = set()
    for name in list_files(ROOT, "*"):
        path = ROOT / name
        if path.suffix in SUFFIXES:
            words.update(re.findall(r"\w+", f"{name}\n{path.read_text()}"))
    return words


def _list_new_names(table: str) -> Iterator[tuple[int, str]]:
    """Yield the names of the last column, and the modules in front of it, with their lines."""
    has_modules = False
    for number, line in enumerate(table.splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[-1].startswith("new "):
            has_modules = len(cells) > 2
        elif line.startswith("| "):
            for cell in (cells[0] if has_modules else "", cells[-1]):
                for name in re.findall(r"`([^`]+)`", cell):
                    yield number, name


def _find_dead_ends(table: str, *, words: set[str]) -> list[str]:
    return [
        f"{number}: {name}"
        for number, name in _list_new_names(table)
        if not words.issuperset(re.findall(r"[A-Za-z_]\w*", name))
    ]


def test_every_new_name_exists() -> None:
    assert _find_dead_ends(RENAMES.read_text(), words=_read_words()) == []


@pytest.mark.parametrize(
    ("row", "dead_ends"),
    [
        ("| `a.old` | `a.new`, `.Loop` |", []),
        ("| `a.old` | `a.gone`, `.Loop` |", ["3: a.gone"]),
    ],
)
def test_new_name_that_no_source_has_is_found(row: str, dead_ends: list[str]) -> None:
    table = f"| old name | new name |\n|---|---|\n{row}"
    assert _find_dead_ends(table, words={"a", "new", "Loop"}) == dead_ends
