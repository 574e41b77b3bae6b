"""Test that every import of a package is declared, and that modules that need an extra are listed.

Otherwise only a nightly run in an empty environment would notice.
"""

from pathlib import Path

import pytest

from tools.environment import PACKAGES
from tools.optional_imports import (
    NEEDS_EXTRA,
    drop_submodules,
    find_modules_needing_extra,
    find_undeclared_imports,
)

ROOT = Path(__file__).resolve().parents[2]


def _package(root: Path, **sources: str) -> Path:
    folder = root / "example"
    inside = folder / "src" / "temper_example"
    inside.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "temper-example"\ndependencies = ["torch>=2", "pyyaml>=6"]\n'
        '[project.optional-dependencies]\nlora = ["peft>=0.18"]\n'
        'all = ["temper-example[lora]", "torch>=2"]\n'
    )
    for name, text in {"__init__": "", **sources}.items():
        (inside / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_table_lists_the_modules_that_need_an_extra(package: str) -> None:
    tops = NEEDS_EXTRA.get(package, ())
    needing = find_modules_needing_extra(ROOT / "packages" / package)
    assert (
        drop_submodules(needing, tops) - {f"temper_{package.replace('-', '_')}.__main__"} == set()
    )
    assert [
        top
        for top in tops
        if not any(name == top or name.startswith(f"{top}.") for name in needing)
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package: str) -> None:
    assert find_undeclared_imports(ROOT / "packages" / package) == []


def test_only_imports_at_module_level_need_the_extra(
    tmp_path: Path,
) -> None:
    package = _package(
        tmp_path,
        adapter="from peft import LoraConfig",
        through="import temper_example.adapter",
        member="from temper_example import adapter",
        later="import torch, yaml\ndef attach():\n    import peft",
        typed="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import peft",
    )
    assert find_modules_needing_extra(package) == {
        f"temper_example.{name}" for name in ("adapter", "through", "member")
    }


def test_modules_of_a_package_whose_init_needs_an_extra_need_it_too(tmp_path: Path) -> None:
    package = _package(tmp_path, __init__="import peft", plain="")
    assert find_modules_needing_extra(package) == {"temper_example", "temper_example.plain"}
    assert drop_submodules(find_modules_needing_extra(package), ["temper_example"]) == set()


def test_undeclared_import_inside_a_function_is_reported(tmp_path: Path) -> None:
    package = _package(tmp_path, late="def read():\n    import numpy.linalg, json, peft, yaml")
    assert find_undeclared_imports(package) == ["temper_example.late: numpy"]
