"""Packages that need an extra name it if it is missing.

A missing module of this package is reported as it is.
"""

import subprocess
import sys

import pytest

from temper_legacy_shim.errors import MissingExtraError, explain_missing_extra


@pytest.mark.parametrize(
    ("feature", "hidden", "extra"),
    [
        ("workers", "torch", "workers"),
        ("workers.ppo_actor", "temper_trainer", "workers"),
        ("data_proto", "numpy", "workers"),
        ("checkpoints.layouts", "numpy", "checkpoint"),
    ],
)
def test_a_package_without_its_extra_says_what_to_install(
    feature: str, hidden: str, extra: str
) -> None:
    # What is None in sys.modules can't be imported, as if it were not installed.
    program = f"import sys; sys.modules[{hidden!r}] = None; import temper_legacy_shim.{feature}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    name = feature.partition(".")[0]
    sentence = (
        f"temper_legacy_shim.{name} needs {hidden}, which is not installed: pip install "
        f"'temper-legacy-shim[{extra}]'."
    )
    assert (
        done.stderr.splitlines()[-1] == f"temper_legacy_shim.errors.MissingExtraError: {sentence}"
    )


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
