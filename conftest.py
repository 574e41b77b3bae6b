"""Lets pytest read this folder's settings where the conformance kit alone is installed, without the plugin that `timeout` is for."""

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare `timeout`, which would otherwise be an unknown option and stop every command of the pages that runs the kit from here."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test, kept by pytest-timeout, which is not installed")
