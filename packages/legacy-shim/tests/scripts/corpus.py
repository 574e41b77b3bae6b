"""Public launch scripts that a machine may have; never in this repository.

``tools/collect_scripts.py`` and ``tools/draw_scripts.py`` collect some.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy" / "scripts"
DRAWN = FOLDER.with_name("drawn")
TABLE = Path(__file__).parents[2] / "tools/drawn_scripts.tsv"


def public_scripts() -> list[Path]:
    """Return all of them, in order; without any, the test is skipped."""
    paths = (
        sorted(
            path
            for path in FOLDER.rglob("*")
            if path.suffix in (".sh", ".bash", ".slurm", ".sbatch")
        )
        if FOLDER.is_dir()
        else []
    )
    if not paths:
        pytest.skip(
            f"needs public launch scripts in {FOLDER}: collect them with tools/collect_scripts.py, "
            "and set TEMPER_TEST_DATA"
        )
    return paths


def drawn_scripts() -> list[tuple[str, Path]]:
    """Return name and file of each script of the table; without them, the test is skipped."""
    if not DRAWN.is_dir():
        pytest.skip(
            f"needs the drawn scripts in {DRAWN}: write them with tools/draw_scripts.py, and set "
            "TEMPER_TEST_DATA"
        )
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return [(f"{name} {path}", DRAWN / name.replace("/", "+") / path) for name, _, path, _ in rows]
