"""What `dev.py test --coverage` adds: the lines and branches of each package that the steps run, in every process that they start.

In: commands of pytest, as coverage runs them instead. Out: a table. What is gone with a killed process is not counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.environment import PACKAGES

FOLDER = Path(".temper") / "coverage" / "all"
"""Below the repository: one file of each process, then their sum."""

HEAD = "| package | statements | run | branches | taken |\n|---|---|---|---|---|"


def clear_coverage(root: Path) -> None:
    """Forget what an earlier run measured."""
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    (root / FOLDER).mkdir(parents=True)


def with_coverage_arguments(arguments: Sequence[str], *, root: Path) -> list[str]:
    """The arguments of a Python that runs a module (`-m pytest ...`) as those of one that also measures it."""
    sources = ",".join(str(root / "packages" / package / "src") for package in PACKAGES)
    return [
        "-m",
        "coverage",
        "run",
        f"--rcfile={root / 'pyproject.toml'}",
        *_data(root),
        f"--source={sources}",
        *arguments,
    ]


def coverage_table(root: Path, *, python: Path) -> str:
    """A row for each package: what all measured processes together ran of it.

    Raises:
        subprocess.CalledProcessError: coverage found nothing that was measured, or no sources to it.
    """
    report = root / FOLDER / "report.json"
    command = [str(python), "-m", "coverage"]
    subprocess.run([*command, "combine", "--quiet", *_data(root)], cwd=root, check=True)
    subprocess.run(
        [*command, "json", "--quiet", *_data(root), "-o", str(report)], cwd=root, check=True
    )
    files = json.loads(report.read_text())["files"]
    rows = [HEAD]
    for package in PACKAGES:
        own = [
            each["summary"]
            for name, each in files.items()
            if Path(name).is_relative_to(f"packages/{package}/src")
        ]
        lines, run, branches, taken = (
            sum(summary[count] for summary in own)
            for count in ("num_statements", "covered_lines", "num_branches", "covered_branches")
        )
        rows.append(
            f"| {package} | {lines:,} | {_share(run, lines)} | {branches:,} | {_share(taken, branches)} |"
        )
    return "\n".join(rows)


def _data(root: Path) -> list[str]:
    return [f"--data-file={root / FOLDER / 'data'}"]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"
