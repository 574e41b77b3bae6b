"""Settings of every test of the trainer."""

import os
import shutil

import pytest
from hypothesis import settings

# Ray's workers yield to every other process (niceness 15) unless told otherwise, and tests share
# their two cores with others.
os.environ.setdefault("RAY_worker_niceness", "0")

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
settings.register_profile("trainer", deadline=None, derandomize=True)
settings.load_profile("trainer")


@pytest.fixture(scope="session")
def needs_bubblewrap() -> None:
    """Skip where bubblewrap is not installed, and fail there under .ci/run, which installs it."""
    if shutil.which("bwrap") is None:
        sentence = "needs Linux with bubblewrap: apt-get install bubblewrap"
        if os.environ.get("TEMPER_CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
