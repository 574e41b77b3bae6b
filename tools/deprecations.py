"""Find deprecations in the sources and check them against the policy.

A deprecated name stays for at least two minor versions, and is deleted in the release that its
warning names. Every call with the keywords `since` and `removed_in` is a deprecation, and so is
every text such as `a.B is deprecated since temper-legacy-shim 0.1.0 and will be removed in 0.4.0:`.
The sources are parsed and not imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

MINORS = 2
"""Minimum number of minor versions between a deprecation and the removal."""

_SENTENCE = re.compile(
    r"(?P<what>\S+) is deprecated since \S+ (?P<since>\d[\d.]*) and will be removed in "
    r"(?P<removed_in>\d[\d.]*): "
)
"""The sentence on a deprecated class of the legacy shim."""
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    """One deprecation in the sources."""

    location: str
    """`file:line`, relative to the package."""
    what: str
    """The deprecated name, as users write it; for a decorator without it, the decorated name."""
    since: str
    removed_in: str


def find_deprecations(package: Path) -> Iterator[Deprecation]:
    """Yield the deprecations of a package.

    Raises:
        ValueError: A version is not a string literal, so that it cannot be read from the sources.
    """
    for file in sorted((package / "src").rglob("*.py")):
        tree = ast.parse(file.read_text())
        owners = {
            id(mark): node.name
            for node in ast.walk(tree)
            if isinstance(node, _NAMED)
            for mark in node.decorator_list
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if match := _SENTENCE.match(node.value):
                    location = f"{file.relative_to(package)}:{node.lineno}"
                    yield Deprecation(location=location, **match.groupdict())
                continue
            keywords = (
                {keyword.arg: keyword.value for keyword in node.keywords}
                if isinstance(node, ast.Call)
                else {}
            )
            if not {"since", "removed_in"} <= keywords.keys() or _passes_own_arguments(keywords):
                continue
            location = (
                f"{file.relative_to(package)}:{node.lineno}" if isinstance(node, ast.Call) else ""
            )
            what = (
                _read_literal(keywords["what"], location)
                if "what" in keywords
                else owners.get(id(node), "")
            )
            yield Deprecation(
                location=location,
                what=what,
                since=_read_literal(keywords["since"], location),
                removed_in=_read_literal(keywords["removed_in"], location),
            )


def check_deprecations(package: Path, version: str) -> list[str]:
    """Check the deprecations of a package for a release of this version; return the faults."""
    faults = []
    for deprecation in find_deprecations(package):
        location = f"{package.name}/{deprecation.location}"
        since, removed = Version(deprecation.since), Version(deprecation.removed_in)
        if removed.major == since.major and removed.minor < since.minor + MINORS:
            faults.append(
                f"{location}: deprecated since {since} and removed in {removed}: "
                f"keep it for at least {MINORS} minor versions"
            )
        if Version(version) >= removed:
            faults.append(
                f"{location}: should be removed in {removed}, and this is {version}: delete it"
            )
    return faults


def _passes_own_arguments(keywords: dict[str | None, ast.expr]) -> bool:
    """Return True if a call only passes on its own arguments, as the mechanism itself does."""
    return all(
        isinstance(value, ast.Name) and value.id == name
        for name, value in keywords.items()
        if name in ("since", "removed_in")
    )


def _read_literal(node: ast.expr, location: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(
        f"{location}: {ast.unparse(node)} is not a string literal: write what, since and "
        "removed_in of a deprecation as literals."
    )
