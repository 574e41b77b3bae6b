"""Test that programs and packages of the scenarios exist, before a nightly run needs them."""

import ast
from pathlib import Path

import pytest

from tools.command_rules import check_pip
from tools.environment import TORCH
from tools.scenarios import SCENARIOS, read_own_loop


def test_own_loop_is_the_program_of_its_page() -> None:
    names = {node.id for node in ast.walk(ast.parse(read_own_loop())) if isinstance(node, ast.Name)}
    assert {"engine", "load_engine_class"} <= names


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_installs_packages_of_this_repository(name: str, tmp_path: Path) -> None:
    lines = [line for line in SCENARIOS[name].installs if line != (TORCH,)]
    wheels = ("pip", "install", "--no-index")  # scenarios install wheels that nox has built
    assert [check_pip((*wheels, *line), tmp_path) for line in lines] == [""] * len(lines)
    assert lines
