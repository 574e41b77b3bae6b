"""Real old checkpoints and traces, where this machine has them."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

LEGACY = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy"

# Ray's workers yield to every other process (niceness 15) unless told otherwise, and tests share
# their two cores with others.
os.environ.setdefault("RAY_worker_niceness", "0")

# golden_traces is shared by the folders below, and this package's own folder is no Python name.
sys.path.insert(0, str(Path(__file__).parent))

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
# Without the phase that explains failures, which traces every line and takes most of the time.
settings.register_profile(
    "shim",
    deadline=None,
    derandomize=True,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("shim")


@pytest.fixture
def samples() -> Path:
    """Return the folder of sample checkpoints."""
    folder = LEGACY / "checkpoints"
    if not folder.is_dir():
        pytest.skip(f"needs real old checkpoints in {folder}: set TEMPER_TEST_DATA")
    return folder
