"""Real old checkpoints, where this machine has them."""

from pathlib import Path

import pytest

LEGACY = Path(__file__).resolve().parents[4] / "shared" / "legacy"
"""Beside the repository."""


@pytest.fixture
def samples() -> Path:
    """The folder of sample checkpoints."""
    folder = LEGACY / "checkpoints"
    if not folder.is_dir():
        pytest.skip(f"needs real old checkpoints in {folder}: a machine that has ../shared/legacy beside the repository runs this")
    return folder
