"""Test that importing a module does not import heavy libraries, directly or through others.

The trainer imports each heavy library in a single component.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("torch", "transformers", "ray", "vllm", "megatron", "peft")

PROGRAM = """
import importlib, pkgutil, sys
names, left_out, unwanted = (text.split(",") for text in sys.argv[1:])
within = lambda name, rooms: any(name == room or name.startswith(room + ".") for room in rooms)
imported = []
def visit(name):
    module = importlib.import_module(name)
    imported.append(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        if not within(found.name, left_out):
            visit(found.name)
for name in names:
    visit(name)
print(len(imported), *sorted(guest for guest in unwanted if guest in sys.modules))
"""


def _guests(
    *modules: str, unwanted: tuple[str, ...], left_out: tuple[str, ...] = ("-",)
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
        ",".join(left_out),
        ",".join(unwanted),
    ]
    variables = os.environ | {"PYTHONPATH": sources}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, *guests = done.stdout.split()
    return int(number), guests


@pytest.mark.parametrize(
    ("modules", "left_out", "unwanted"),
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
def test_configurations_are_read_without_anything_heavy(
    modules: tuple[str, ...], left_out: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    number, guests = _guests(*modules, unwanted=unwanted, left_out=left_out)
    assert guests == []
    assert number >= len(modules)


# nightly, because it imports torch and transformers; import-linter checks import statements daily
@pytest.mark.nightly
def test_ray_vllm_and_hydra_have_one_door_each_in_the_trainer() -> None:
    doors = (
        "runtime.ray",
        "rollout.vllm",
        "config_loading",
        "__main__",
    )
    number, guests = _guests(
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
        left_out=tuple(f"temper_trainer.{door}" for door in doors),
    )
    assert guests == []
    assert number > 50


def test_a_guest_that_comes_along_is_seen() -> None:
    assert _guests(
        "temper_engine_api.contract_version", "fractions", unwanted=("numpy", "fractions")
    ) == (
        2,
        ["fractions"],
    )
