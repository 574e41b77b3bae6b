"""Generate the compatibility page: supported versions of siblings, Python and torch; releases."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tools.compat import TrialRecord, list_changed_packages, read_matrix
from tools.environment import PACKAGES
from tools.release_checks import read_declared_version
from tools.release_records import read_records
from tools.requirements import list_sibling_pairs, read_requirements, sibling_requirements

HEAD = """\
# Compatibility

Generated from the packages' declarations, `tools/releases.toml`, and the last trials of
`nox -s compat` in `tools/matrix.json`. Siblings accept each other within a minor version. An engine
that was built for another contract than the installed one is refused when it is looked up; the
error names both versions and what to install.
"""

TRIALS_HEAD = """\
## Tried together

For every package and each sibling that it requires, `nox -s compat` runs the tests of the
dependent package. One of the two is from this checkout, the other is its last release.

| required | by | passed | time (UTC) | commit |
|---|---|---|---|---|"""


def build_compatibility_page(root: Path) -> str:
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
        torch = _format_torch(folder, extras)
        siblings = sorted(
            {f"{each.name} {each.specifier}" for each in sibling_requirements(folder)}
        )
        cells = [
            f"temper-{name}",
            read_declared_version(folder),
            project["requires-python"],
            torch,
            "; ".join(siblings) or "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", TRIALS_HEAD, *_format_trials(root)]
    lines += ["", "## Released", "", "| release | date | commit | withdrawn |", "|---|---|---|---|"]
    lines += [
        f"| temper-{record.package} {record.version} | {record.date} | `{record.commit[:12]}` | "
        f"{record.withdrawn} |"
        for record in read_records(root)
    ]
    return "\n".join(lines) + "\n"


def _format_torch(folder: Path, extras: Iterable[str]) -> str:
    """Return the torch versions that a package requires, or those of its extras."""
    required = [str(each.specifier) for each in read_requirements(folder) if each.name == "torch"]
    in_extras = [
        f"{each.specifier} with `[{extra}]`"
        for extra in extras
        for each in read_requirements(folder, extras=[extra])
        if each.name == "torch"
    ]
    return ", ".join(required or ["none", *in_extras])


def _format_trials(root: Path) -> list[str]:
    """Return a table row for each pair of packages."""
    records = {each.pair: each for each in read_matrix(root)}
    rows = []
    for pair in list_sibling_pairs(root / "packages" / name for name in PACKAGES):
        dependency, dependent = pair.split(":")
        record = records.get(pair)
        cells = (
            ["no trial is recorded", "", ""]
            if record is None
            else ["; ".join(record.passed), record.at[:16], _format_commit(root, record)]
        )
        rows.append("| " + " | ".join([dependency, dependent, *cells]) + " |")
    return rows


def _format_commit(root: Path, record: TrialRecord) -> str:
    """Return the commit of a trial and what has changed since; a release needs a new trial then."""
    changed = list_changed_packages(root, record)
    return f"`{record.commit[:7]}`" + (
        f"; since then changed: {', '.join(changed)}" if changed else ""
    )
