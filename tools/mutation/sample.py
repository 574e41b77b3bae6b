"""The sample of mutants, and those that need not be detected."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass

from tools.mutation.sessions import ROOT

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
    """Number of the position among those that the operator can change in this module."""
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


def read_sample() -> list[Mutant]:
    """Return the sampled mutants."""
    return [
        Mutant(**{**row, "old": tuple(row["old"]), "new": tuple(row["new"])})
        for row in json.loads(SAMPLE.read_text())
    ]


def read_equivalents() -> dict[str, tuple[str, str]]:
    """Return kind and reason of the mutants that need not be detected, by id."""
    rows = tomllib.loads(EQUIVALENTS.read_text()).get("mutant", [])
    return {row["id"]: (row["kind"], row["reason"]) for row in rows}
