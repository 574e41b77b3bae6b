"""Entry point for pytest, loaded in every session where this package is installed.

It does nothing unless the session runs the kit.
"""

import os
from collections.abc import Sequence

import pytest

from temper_engine_api.conformance import KIT, PLUGIN, missing_extra


def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Load the kit's plugin if the command line names the kit, as a module or as a folder.

    A conftest inside an installed package is found too late, because ``--pyargs`` resolves names at
    collection. Options that every session had could collide with those of other plugins.

    Raises:
        UsageError: The kit's extra is not installed.
    """
    if any(
        KIT in argument.replace(os.sep, ".") for argument in args if not argument.startswith("-")
    ):
        if message := missing_extra():
            raise pytest.UsageError(message)
        early_config.pluginmanager.import_plugin(PLUGIN)
