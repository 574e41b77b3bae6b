"""The compatibility table: what each package accepts of its siblings, of Python and of torch, and what has been released."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.bounds import declared, sibling_requirements
from tools.environment import PACKAGES
from tools.release_checks import declared_version
from tools.releases import read_records

HEAD = """\
# Compatibility

Generated from the packages' declarations and `tools/releases.toml`. Siblings accept each other within a minor version, and
`nox -s compat` tries every pair: HEAD of one with the last release of the other, both ways round. An engine that was built for another
contract than the installed one is refused when it is looked up, with both versions and what to install.
"""


def compatibility_page(root: Path) -> str:
    """The page, in Markdown."""
    lines = [HEAD, "| package | version here | Python | torch | siblings |", "|---|---|---|---|---|"]
    for name in PACKAGES:
        folder = root / "packages" / name
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        torch = {str(each.specifier) for each in declared(folder, extras=extras) if each.name == "torch"}
        siblings = sorted({f"{each.name} {each.specifier}" for each in sibling_requirements(folder)})
        cells = [
            f"temper-{name}",
            declared_version(folder),
            project["requires-python"],
            ", ".join(torch) or "none",
            "; ".join(siblings) or "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Released", "", "| release | date | commit |", "|---|---|---|"]
    lines += [f"| temper-{record.package} {record.version} | {record.date} | `{record.commit[:12]}` |" for record in read_records(root)]
    return "\n".join(lines) + "\n"
