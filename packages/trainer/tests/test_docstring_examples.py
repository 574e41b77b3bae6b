"""The examples in docstrings give the results that they show."""

import doctest
import importlib

import pytest

MODULES = (
    "batching.samples",
    "batching.step_plan",
    "checkpoint.checkpoint_messages",
    "loops.seeds",
    "loops.staleness",
    "metrics.run_files",
    "metrics.terminal",
    "progress",
    "types",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_correct(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"temper_trainer.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
