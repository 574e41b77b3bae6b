"""The sample of mutants, and those that need not be detected."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache

from tools.mutation.sessions import ROOT, SOURCES

SAMPLE = ROOT / "tools" / "mutation_sample.json"
EQUIVALENTS = ROOT / "tools" / "mutation_equivalents.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module with one changed position."""

    id: str
    """Eight hexadecimal digits; does not depend on other lines of the module."""
    module: str
    """A path of MODULES."""
    operator: str
    """Operator of cosmic-ray."""
    occurrence: int
    """Number of the position among those that the operator can change in this module.

    Only `draw` reads it: `locate` does not change it when code before the position changes.
    """
    line: int
    """First changed line, from 1."""
    old: tuple[str, ...]
    """The changed lines before the change."""
    new: tuple[str, ...]
    """The same lines after the change."""
    context: str
    """Hash of the function that contains the change, before the change."""

    def apply(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: If the source is not the one from which the mutant was drawn.
        """
        lines = source.split("\n")
        first, end = self.line - 1, self.line - 1 + len(self.old)
        if tuple(lines[first:end]) != self.old:
            raise ValueError(
                f"{self.module} has changed at line {self.line} since the sample was drawn: run "
                "`python -m tools.mutation draw`."
            )
        return "\n".join([*lines[:first], *self.new, *lines[end:]])

    def locate(self, source: str) -> Mutant | None:
        """Return the mutant at its present line; None if the changed lines are gone.

        If a module has these lines several times, the nearest ones in an unchanged function are
        taken, or the nearest ones if there are none.
        """
        lines, size = source.split("\n"), len(self.old)
        starts = [
            start
            for start in range(len(lines) - size + 1)
            if tuple(lines[start : start + size]) == self.old
        ]
        if not starts:
            return None

        def rank(start: int) -> tuple[bool, int]:
            is_changed = hash_context(source, line=start + 1) != self.context
            return is_changed, abs(start + 1 - self.line)

        line = 1 + min(starts, key=rank)
        return replace(self, line=line, context=hash_context(source, line=line))


def hash_parts(*parts: object) -> str:
    """Return a hash that is the same in every process."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def hash_context(source: str, *, line: int) -> str:
    """Return a hash of the innermost function around a line, or of the line itself.

    Comments, docstrings, indentation and empty lines do not change it.
    """
    code, functions = _read_code(source)
    # A function begins after those that enclose it.
    first, last = max(
        (lines for lines in functions if lines[0] <= line <= lines[1]), default=(line, line)
    )
    return hash_parts(*(text for text in code[first - 1 : last] if text))[:12]


@cache
def _read_code(source: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the lines without comments and docstrings, and first and last line of functions."""
    # The text and not the syntax tree, which differs between versions of Python.
    code, functions = source.split("\n"), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            code[row - 1] = code[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            end = first.end_lineno or first.lineno
            code[first.lineno - 1 : end] = [""] * (end - first.lineno + 1)
    return [text.strip() for text in code], functions


def read_sample() -> list[Mutant]:
    """Return the sampled mutants."""
    return [
        Mutant(**{**row, "old": tuple(row["old"]), "new": tuple(row["new"])})
        for row in json.loads(SAMPLE.read_text())
    ]


def write_sample(mutants: Iterable[Mutant]) -> None:
    """Replace the file with the sample."""
    SAMPLE.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1) + "\n")


def locate_sample(mutants: Iterable[Mutant]) -> list[Mutant]:
    """Return the mutants at their present lines.

    Raises:
        ValueError: If the code that a mutant changes is gone.
    """
    located = []
    for mutant in mutants:
        current = mutant.locate((SOURCES / mutant.module).read_text())
        if current is None:
            raise ValueError(
                f"{mutant.module} has no line `{mutant.old[0].strip()}` any more, which mutant "
                f"{mutant.id} changes: run `python -m tools.mutation draw`, and then the mutants "
                "that are new."
            )
        located.append(current)
    return located


def read_equivalents() -> dict[str, tuple[str, str]]:
    """Return kind and reason of the mutants that need not be detected, by id."""
    rows = tomllib.loads(EQUIVALENTS.read_text()).get("mutant", [])
    return {row["id"]: (row["kind"], row["reason"]) for row in rows}
