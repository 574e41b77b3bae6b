"""Public launch scripts that a machine may have; never in this repository.

``tools/collect_scripts.py`` collects some.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy" / "scripts"


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
