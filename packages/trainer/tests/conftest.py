"""Settings of every test of the trainer."""

import gc
import os

from hypothesis import settings

# Ray's workers yield to every other process (niceness 15) unless told otherwise, and tests share their two cores with others.
os.environ.setdefault("RAY_worker_niceness", "0")

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
settings.register_profile("trainer", deadline=None, derandomize=True)
settings.load_profile("trainer")


def pytest_collection_finish() -> None:
    """Modules stay as long as the session: a full collection, such as every engine makes when it is closed, need not look at them."""
    gc.freeze()
