"""The examples in docstrings of all packages give the results that they show."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_EXAMPLES = {
    ".".join(file.relative_to(source).with_suffix("").parts): count
    for source in sorted(ROOT.glob("packages/*/src"))
    for file in sorted(source.rglob("*.py"))
    if (count := len(re.findall(r"^ *>>> ", file.read_text(encoding="utf-8"), re.MULTILINE)))
}
"""Number of statements in examples by module."""
OPTIONAL = {"temper_trainer.environment.mcp_environment": "mcp"}
"""Modules that import a library of an extra, which the everyday environment lacks."""


@pytest.mark.parametrize("module", NUM_EXAMPLES)
def test_docstring_examples_are_correct(module: str) -> None:
    if module in OPTIONAL:
        pytest.importorskip(OPTIONAL[module], reason=f"needs {OPTIONAL[module]}: an extra")
    results = doctest.testmod(importlib.import_module(module))
    assert results.failed == 0
    # doctest does not see docstrings of fields, for example.
    assert results.attempted == NUM_EXAMPLES[module]
