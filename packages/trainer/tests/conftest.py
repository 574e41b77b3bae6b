"""Settings of every test of the trainer."""

import os

from hypothesis import settings

# Ray's workers yield to every other process (niceness 15) unless told otherwise, and tests share their two cores with others.
os.environ.setdefault("RAY_worker_niceness", "0")

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
settings.register_profile("trainer", deadline=None, derandomize=True)
settings.load_profile("trainer")
