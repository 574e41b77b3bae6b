"""Settings of every test of the trainer."""

from hypothesis import settings

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
settings.register_profile("trainer", deadline=None, derandomize=True)
settings.load_profile("trainer")
