"""Public launch scripts that a machine may have; never in this repository. ``tools/collect_scripts.py`` collects some."""

import os
from pathlib import Path

import pytest

NAMED = "TEMPER_LAUNCH_SCRIPTS"
FOLDER = Path(os.environ.get(NAMED) or Path(__file__).resolve().parents[5] / "shared" / "legacy" / "scripts")
"""The folder that the variable names, or one beside the repository."""


def public_scripts() -> list[Path]:
    """All of them, in order; without any, the test is skipped."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".sh", ".bash", ".slurm", ".sbatch")) if FOLDER.is_dir() else []
    if not paths:
        pytest.skip(f"needs public launch scripts in {FOLDER}, or in a folder that {NAMED} names: a machine that has some runs this")
    return paths
