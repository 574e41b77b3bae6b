"""Test that programs and packages of the scenarios exist, before a nightly run needs them."""

import ast
from pathlib import Path

import pytest

from tools.command_rules import pip_install
from tools.environment import TORCH
from tools.scenarios import SCENARIOS, own_loop


def test_the_loop_of_ones_own_is_the_pages_program() -> None:
    names = {node.id for node in ast.walk(ast.parse(own_loop())) if isinstance(node, ast.Name)}
    assert {"engine", "load_engine_class"} <= names


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_installs_packages_of_ours(name: str, tmp_path: Path) -> None:
    lines = [line for line in SCENARIOS[name].installs if line != (TORCH,)]
    assert [pip_install(("pip", "install", *line), tmp_path) for line in lines] == [""] * len(lines)
    assert lines
