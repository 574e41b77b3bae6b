"""Entry point for pytest, loaded in every session where this package is installed.

It does nothing unless the session runs the kit.
"""

import os
from collections.abc import Sequence

import pytest

from temper_engine_api.conformance import KIT, PLUGIN, describe_missing_extra


def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Load the kit's plugin if the command line names the kit, as a module or as a folder.

    A conftest inside the package would be loaded too late to add options, because pytest resolves
    `--pyargs` at collection. The plugin is not loaded in other sessions, where its options could
    collide with other plugins' options.

    Raises:
        UsageError: The kit's extra is not installed.
    """
    if any(
        KIT in argument.replace(os.sep, ".") for argument in args if not argument.startswith("-")
    ):
        if message := describe_missing_extra():
            raise pytest.UsageError(message)
        early_config.pluginmanager.import_plugin(PLUGIN)
