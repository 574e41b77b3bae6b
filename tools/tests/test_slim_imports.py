"""Test that importing a module does not import heavy libraries, directly or through others.

The trainer imports each heavy library in a single component.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.optional_imports import NEEDS_EXTRA

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("torch", "transformers", "ray", "vllm", "megatron", "peft")

PROGRAM = """
import importlib, pkgutil, sys
names, excluded, unwanted = (text.split(",") for text in sys.argv[1:])
imported = []

def is_excluded(name):
    return any(name == module or name.startswith(module + ".") for module in excluded)

def visit(name):
    package = importlib.import_module(name)
    imported.append(name)
    for module in pkgutil.iter_modules(getattr(package, "__path__", []), name + "."):
        if not is_excluded(module.name):
            visit(module.name)

for name in names:
    visit(name)
print(len(imported), *sorted(library for library in unwanted if library in sys.modules))
"""


def _import_and_find_unwanted(
    *modules: str, unwanted: tuple[str, ...], excluded: tuple[str, ...] = ("-",)
) -> tuple[int, list[str]]:
    """Return the number of modules imported in a fresh process, and the unwanted ones among them.

    Modules within packages are imported and counted too.
    """
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        ",".join(modules),
        ",".join(excluded),
        ",".join(unwanted),
    ]
    variables = os.environ | {"PYTHONPATH": sources}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, *libraries = done.stdout.split()
    return int(number), libraries


@pytest.mark.parametrize(
    ("modules", "excluded", "unwanted"),
    [
        (
            ("temper_legacy_shim.cli", "temper_legacy_shim.configs"),
            ("-",),
            (*HEAVY, "numpy", "hydra", "temper_trainer", "temper_engine_api"),
        ),
        (("temper_trainer.config", "temper_trainer.config_loading"), ("-",), HEAVY),
        (("temper_engine_fsdp.config", "temper_engine_fsdp.layouts"), ("-",), HEAVY),
        (("temper_engine_megatron.config", "temper_engine_megatron.layouts"), ("-",), HEAVY),
    ],
    ids=["legacy-shim", "trainer", "engine-fsdp", "engine-megatron"],
)
def test_configurations_are_read_without_heavy_libraries(
    modules: tuple[str, ...], excluded: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    number, libraries = _import_and_find_unwanted(*modules, unwanted=unwanted, excluded=excluded)
    assert libraries == []
    assert number >= len(modules)


# nightly, because it imports torch and transformers; import-linter checks import statements daily
@pytest.mark.nightly
def test_ray_vllm_and_hydra_are_each_imported_by_one_component() -> None:
    importers = (
        "runtime.ray",
        "rollout.vllm",
        "config_loading",
        "__main__",
    )
    number, libraries = _import_and_find_unwanted(
        "temper_trainer",
        unwanted=(
            "ray",
            "vllm",
            "hydra",
            "omegaconf",
            "wandb",
            "datasets",
            "math_verify",
            "temper_engine_fsdp",
            "temper_engine_megatron",
        ),
        excluded=(*(f"temper_trainer.{module}" for module in importers), *NEEDS_EXTRA["trainer"]),
    )
    assert libraries == []
    assert number > 50


def test_indirectly_imported_library_is_found() -> None:
    assert _import_and_find_unwanted(
        "temper_engine_api.contract_version", "fractions", unwanted=("numpy", "fractions")
    ) == (
        2,
        ["fractions"],
    )
