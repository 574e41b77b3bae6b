r"""A pytest plugin that continues an interrupted run of the conformance kit.

    python -m pytest -p tools.skip_passed --skip-passed A.json,B.json \
        --pyargs temper_engine_api.conformance --engine NAME

skips the tests that passed before.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from temper_engine_api.conformance.results import ConformanceResult, Outcome, from_json


def read_passed(paths: Iterable[Path]) -> dict[str, ConformanceResult]:
    """Return the passed results of earlier runs by test name, which includes the layout."""
    return {
        result.test: result
        for path in paths
        for result in from_json(path.read_text()).with_outcome(Outcome.PASSED)
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option --skip-passed."""
    parser.addoption(
        "--skip-passed",
        default="",
        help="result files of earlier runs, comma-separated; tests that passed there are skipped",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that passed in an earlier run."""
    passed = read_passed(map(Path, filter(None, config.getoption("--skip-passed").split(","))))
    skipped = [item for item in items if item.name in passed]
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item.name not in passed]
