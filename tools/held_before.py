"""A plugin for runs of the conformance kit that go on where an earlier one was cut short: laws that held there are left out.

``python -m pytest -p tools.held_before --held-before A.json,B.json --pyargs temper_engine_api.conformance --engine NAME``
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from temper_engine_api.conformance.results import ConformanceResult, Outcome, from_json


def held_in(paths: Iterable[Path]) -> dict[str, ConformanceResult]:
    """Laws that held, by their name, in which the layout is a part."""
    return {
        result.test: result
        for path in paths
        for result in from_json(path.read_text()).with_outcome(Outcome.PASSED)
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option."""
    parser.addoption(
        "--held-before",
        default="",
        help="files that --results wrote, with commas: laws that held in them are left out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave them out, and say that they are."""
    held = held_in(map(Path, filter(None, config.getoption("--held-before").split(","))))
    left_out = [item for item in items if item.name in held]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.name not in held]
