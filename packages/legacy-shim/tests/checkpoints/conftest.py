"""Makes the writers of old files importable here, and forks each comparison of names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _fork_every_comparison(fork_comparing_processes: None) -> None:
    """Fork the processes that compare names in all tests of this folder."""
