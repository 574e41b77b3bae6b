"""What tests of the Python tool need of the machine."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def needs_bubblewrap() -> None:
    """Skip where bubblewrap is not installed, and fail there under .ci/run, which installs it."""
    if shutil.which("bwrap") is None:
        sentence = "needs Linux with bubblewrap: apt-get install bubblewrap"
        if os.environ.get("TEMPER_CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
