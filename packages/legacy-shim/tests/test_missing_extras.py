"""Packages that need an extra name it if it is missing.

A missing module of this package is reported as it is.
"""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from forked_processes import run_program

from temper_legacy_shim.errors import MissingExtraError, explain_missing_extra, format_extra_install


@pytest.mark.parametrize(
    ("feature", "hidden", "extra"),
    [
        ("workers", "torch", "workers"),
        ("workers.ppo_actor", "temper_trainer", "workers"),
        ("data_proto", "numpy", "workers"),
        ("checkpoints.layouts", "numpy", "checkpoint"),
        ("checkpoints.layouts", "blake3", "checkpoint"),
    ],
)
def test_a_package_without_its_extra_says_what_to_install(
    feature: str, hidden: str, extra: str
) -> None:
    # What is None in sys.modules can't be imported, as if it were not installed. The process has
    # imported these modules, so that it has to forget them first.
    program = (
        "import sys\n"
        "for name in tuple(sys.modules):\n"
        f"    if name.startswith('temper_') or name.partition('.')[0] == {hidden!r}:\n"
        "        del sys.modules[name]\n"
        f"sys.modules[{hidden!r}] = None\n"
        f"import temper_legacy_shim.{feature}\n"
    )
    done = run_program(program)
    name = feature.partition(".")[0]
    sentence = (
        f"temper_legacy_shim.{name} needs {hidden}, which is not installed: run "
        f"{format_extra_install(extra)}."
    )
    assert (
        done.stderr.splitlines()[-1] == f"temper_legacy_shim.errors.MissingExtraError: {sentence}"
    )


def test_conversion_without_blake3_is_refused_with_the_command(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['blake3'] = None; from temper_legacy_shim.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs blake3, which is not installed: run pip install " in done.stderr


def test_code_that_expects_a_missing_module_still_does() -> None:
    result = explain_missing_extra(
        "workers", "workers", ModuleNotFoundError("No module named 'ray.util'", name="ray.util")
    )
    assert isinstance(result, MissingExtraError)
    assert isinstance(result, ModuleNotFoundError)
    assert result.name == "ray.util"
    target = ModuleNotFoundError(
        "No module named 'temper_legacy_shim.workers.gone'", name="temper_legacy_shim.workers.gone"
    )
    assert explain_missing_extra("workers", "workers", target) is target


def test_message_names_both_ways_to_install_an_extra() -> None:
    assert format_extra_install("checkpoint") == (
        "pip install ./packages/engine-api './packages/legacy-shim[checkpoint]' in a clone of "
        "Temper (with its wheels in DIR: pip install --find-links DIR "
        "'temper-legacy-shim[checkpoint]')"
    )


@pytest.mark.parametrize("extra", ["checkpoint", "workers", "workers-megatron"])
def test_command_for_a_clone_has_all_packages_of_temper_that_an_extra_requires(extra: str) -> None:
    command = format_extra_install(extra).partition(" in a clone")[0]
    given = {f"temper-{name}" for name in re.findall(r"\./packages/([a-z-]+)", command)}
    assert given == required_packages("temper-legacy-shim", extra)


def required_packages(package: str, extra: str = "") -> set[str]:
    """Return a package and those of Temper that it requires with an extra, of installed ones."""
    packages = {package}
    for line in requires(package) or ():
        requirement = re.match(r"(temper-[a-z-]+)(?:\[([a-z-]+)\])?", line)
        condition = re.search(r"extra == '([a-z-]+)'", line.replace('"', "'"))
        if requirement and (condition is None or condition[1] == extra):
            packages |= required_packages(requirement[1], requirement[2] or "")
    return packages
