"""pytest plugin: replace functions of another project by our adapters while its tests run.

It reads the suite's name from TEMPER_PEER, and writes the outcome of each test to the file
TEMPER_PEER_RESULTS. With TEMPER_PEER_OWN nothing is replaced, to see the tests pass on their own.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tools.peers.padded import NoCounterpartError
from tools.peers.suites import SUITES

_outcomes: dict[str, dict[str, str]] = {}


def pytest_configure() -> None:
    """Replace the functions before any test module imports them."""
    suite = SUITES[os.environ["TEMPER_PEER"]]
    # A MagicMock has every attribute, which is enough for the imports.
    sys.modules.update({name: MagicMock() for name in suite.stubs})
    if os.environ.get("TEMPER_PEER_OWN"):
        return
    for module_name, replaced in suite.replaced.items():
        _replace(importlib.import_module(module_name), replaced)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace the names of test modules that load their own copy of a module."""
    suite = SUITES[os.environ["TEMPER_PEER"]]
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    for module in () if os.environ.get("TEMPER_PEER_OWN") else modules:
        _replace(module, suite.replaced_in_tests)


def _replace(module: Any, replaced: Mapping[str, str | None]) -> None:
    for name, adapter in replaced.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, _load(adapter, name))


def _load(adapter: str | None, name: str) -> Callable[..., Any]:
    if adapter is not None:
        module_name, _, attribute = adapter.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
        return loaded

    def refuse(*args: object, **kwargs: object) -> None:
        # Not NoCounterpartError: tests of unittest do not pass through `pytest_pyfunc_call`.
        pytest.skip(f"no counterpart: {name}")

    return refuse


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Turn what has no counterpart into a skip."""
    try:
        return (yield)
    except NoCounterpartError as error:
        pytest.skip(f"no counterpart: {error}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of each test; one that fails in its setup has failed."""
    if report.when == "call" or report.outcome != "passed":
        detail = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        if report.outcome == "failed":
            detail = str(getattr(report.longrepr, "reprcrash", "")).splitlines()[0][:300]
        _outcomes[report.nodeid] = {"outcome": report.outcome, "detail": detail}


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["TEMPER_PEER_RESULTS"]).write_text(json.dumps(_outcomes))
