"""The examples in the docstrings of the contract's types run, and print what they say."""

import doctest
import importlib

import pytest

MODULES = ("batch", "metrics", "objective", "outputs", "plan", "reduction", "schedule", "topology")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"temper_engine_api.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
