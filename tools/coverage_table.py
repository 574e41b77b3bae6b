"""Measure which lines and branches of each package the test steps execute, in all processes.

`dev.py test --coverage` uses it. Lines that only a killed process executed are not counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.environment import PACKAGES

FOLDER = Path(".temper") / "coverage" / "all"
"""Data of every process, then of all together; below the repository."""

HEAD = "| package | statements | run | branches | taken |\n|---|---|---|---|---|"


def clear_coverage(root: Path) -> None:
    """Delete the data of an earlier run."""
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    (root / FOLDER).mkdir(parents=True)


def wrap_in_coverage(arguments: Sequence[str], *, root: Path) -> list[str]:
    """Return Python arguments that run a module (`-m pytest ...`) under coverage."""
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


def build_coverage_table(root: Path, *, python: Path) -> str:
    """Combine the data of all processes; return a Markdown table with one row per package.

    Raises:
        subprocess.CalledProcessError: coverage found no data, or no sources that match it.
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
        summaries = [
            each["summary"]
            for name, each in files.items()
            if Path(name).is_relative_to(f"packages/{package}/src")
        ]
        lines, run, branches, taken = (
            sum(summary[count] for summary in summaries)
            for count in ("num_statements", "covered_lines", "num_branches", "covered_branches")
        )
        rows.append(
            f"| {package} | {lines:,} | {_percentage(run, lines)} "
            f"| {branches:,} | {_percentage(taken, branches)} |"
        )
    return "\n".join(rows)


def _data(root: Path) -> list[str]:
    return [f"--data-file={root / FOLDER / 'data'}"]


def _percentage(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "none"
