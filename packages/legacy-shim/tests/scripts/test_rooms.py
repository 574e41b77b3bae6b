"""Rooms of the reader that call one another can each be imported first."""

import pkgutil
import subprocess
import sys

import temper_legacy_shim.scripts


def test_each_module_may_be_imported_first() -> None:
    names = [found.name for found in pkgutil.iter_modules(temper_legacy_shim.scripts.__path__, "temper_legacy_shim.scripts.")]
    assert len(names) > 10
    for name in names:
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
