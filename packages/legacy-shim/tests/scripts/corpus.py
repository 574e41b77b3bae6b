"""Public launch scripts that a machine may have; never in this repository. ``tools/collect_scripts.py`` collects some."""

import os
from pathlib import Path

import pytest

NAMED = "TEMPER_LAUNCH_SCRIPTS"
FOLDER = Path(os.environ.get(NAMED) or Path(os.environ["TEMPER_TEST_DATA"]) / "legacy" / "scripts")


def public_scripts() -> list[Path]:
    """All of them, in order; without any, the test is skipped."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".sh", ".bash", ".slurm", ".sbatch")) if FOLDER.is_dir() else []
    if not paths:
        pytest.skip(f"needs public launch scripts in {FOLDER}: set {NAMED} or TEMPER_TEST_DATA")
    return paths
