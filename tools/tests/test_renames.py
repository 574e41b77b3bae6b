"""Test that docs/records/renames.md leads to names that exist.

A reader who follows a name of an earlier commit must not end at an intermediate name. The parts of
a name are searched among the identifiers and keys of the sources, because a row may name an
attribute, a metric or an argument. Docstrings and comments contain most English words, so they do
not count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.equal_numbers import RENAMES
from tools.git_changes import list_files

ROOT = Path(__file__).resolve().parents[2]
_SETTING = re.compile(r"^[\s\[-]*([\w.\"/-]+)\s*[:=\]]", re.MULTILINE)
"""A key or a section of a YAML or TOML file; comments do not match."""
_KEY = re.compile(r"\S+")
"""Strings without a space are keys, metrics or paths rather than prose."""


def _list_identifiers(source: str) -> Iterator[str]:
    """Yield the names that Python code uses or defines, and its keys, but no prose."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield f"{name} {other}"
            case ast.Constant(value=str(text)) if _KEY.fullmatch(text):
                yield text


def _read_words() -> set[str]:
    """Return the identifiers of all sources, and the words of their paths."""
    texts: list[str] = []
    for name in list_files(ROOT, "*"):
        path = ROOT / name
        if path == Path(__file__):  # It has invented names.
            continue
        if path.suffix == ".py":
            texts += [name, *_list_identifiers(path.read_text())]
        elif path.suffix in {".toml", ".yaml", ".yml"}:
            texts += [name, *_SETTING.findall(path.read_text())]
    return set(re.findall(r"\w+", "\n".join(texts)))


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


def test_names_of_prose_are_not_identifiers() -> None:
    source = '''
"""A docstring with gone in it."""
metrics["policy/loss"] = compute(value, name=1)  # gone
'''
    names = ["compute", "metrics", "name", "policy/loss", "value"]
    assert sorted(_list_identifiers(source)) == names


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
