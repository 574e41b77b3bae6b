"""Generate the compatibility page: supported versions of siblings, Python and torch; releases."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tools.bounds import declared, pairs, sibling_requirements
from tools.compat import TrialRecord, changed_since, read_matrix
from tools.environment import PACKAGES
from tools.release_checks import declared_version
from tools.releases import read_records

HEAD = """\
# Compatibility

Generated from the packages' declarations, `tools/releases.toml`, and the last trials of `nox -s compat` in `tools/matrix.json`. Siblings
accept each other within a minor version. An engine that was built for another contract than the installed one is refused when it is
looked up, with both versions and what to install.
"""

TRIED = """\
## Tried together

`nox -s compat` runs, for every package and each that it requires, the tests of the one that requires: one of the two as it is here, the
other as it was last released.

| required | by | passed | when (UTC) | at |
|---|---|---|---|---|"""


def compatibility_page(root: Path) -> str:
    """Return the page in Markdown."""
    lines = [
        HEAD,
        "| package | version here | Python | torch | siblings |",
        "|---|---|---|---|---|",
    ]
    for name in PACKAGES:
        folder = root / "packages" / name
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        torch = _torch(folder, extras)
        siblings = sorted(
            {f"{each.name} {each.specifier}" for each in sibling_requirements(folder)}
        )
        cells = [
            f"temper-{name}",
            declared_version(folder),
            project["requires-python"],
            torch,
            "; ".join(siblings) or "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", TRIED, *_trials(root)]
    lines += ["", "## Released", "", "| release | date | commit | withdrawn |", "|---|---|---|---|"]
    lines += [
        f"| temper-{record.package} {record.version} | {record.date} | `{record.commit[:12]}` | "
        f"{record.withdrawn} |"
        for record in read_records(root)
    ]
    return "\n".join(lines) + "\n"


def _torch(folder: Path, extras: Iterable[str]) -> str:
    """Return the torch versions that a package requires, or those of its extras."""
    required = [str(each.specifier) for each in declared(folder) if each.name == "torch"]
    in_extras = [
        f"{each.specifier} with `[{extra}]`"
        for extra in extras
        for each in declared(folder, extras=[extra])
        if each.name == "torch"
    ]
    return ", ".join(required or ["none", *in_extras])


def _trials(root: Path) -> list[str]:
    """Return a table row for each pair of packages."""
    green = {each.pair: each for each in read_matrix(root)}
    rows = []
    for pair in pairs(root / "packages" / name for name in PACKAGES):
        dependency, dependent = pair.split(":")
        found = green.get(pair)
        cells = (
            ["no trial is kept", "", ""]
            if found is None
            else ["; ".join(found.passed), found.at[:16], _where(root, found)]
        )
        rows.append("| " + " | ".join([dependency, dependent, *cells]) + " |")
    return rows


def _where(root: Path, green: TrialRecord) -> str:
    """Return the commit of a trial and what has changed since; a release needs a new trial then."""
    changed = changed_since(root, green)
    return f"`{green.commit[:7]}`" + (
        f"; since then changed: {', '.join(changed)}" if changed else ""
    )
