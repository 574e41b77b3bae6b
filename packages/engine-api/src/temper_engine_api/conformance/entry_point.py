"""What pytest loads in every session where this package is installed: nothing, unless the session runs the kit."""

import os
from collections.abc import Sequence

import pytest

from temper_engine_api.conformance import KIT, PLUGIN, missing_extra


def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Register the kit's options where the command line names the kit, as a module or as a folder.

    An option of a conftest inside an installed package is not seen in time (``--pyargs`` resolves names only at collection), and an
    option that every session had would collide with others' plugins.

    Raises:
        UsageError: the kit's extra is not installed.
    """
    if any(
        KIT in argument.replace(os.sep, ".") for argument in args if not argument.startswith("-")
    ):
        if sentence := missing_extra():
            raise pytest.UsageError(sentence)
        early_config.pluginmanager.import_plugin(PLUGIN)
