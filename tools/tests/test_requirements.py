"""Check that `oldest` can install every requirement, and that pins are within declared bounds."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.requirements import (
    list_sibling_pairs,
    pin_lower_bound,
    pin_lower_bounds,
    read_requirements,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def _extras(package: Path) -> list[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return list(project.get("optional-dependencies", {}))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_requirement_has_a_lower_bound(package: Path) -> None:
    pins = pin_lower_bounds(package, extras=_extras(package))
    expected = {
        requirement.name for requirement in read_requirements(package, extras=_extras(package))
    }
    assert {pin.partition("==")[0] for pin in pins} == expected


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_everyday_pins_satisfy_the_declared_bounds(package: Path) -> None:
    lines = (
        line.partition("#")[0].strip()
        for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    )
    pins = dict(line.split("==") for line in lines if line)
    outside = [
        f"{each} excludes {pins[each.name]}"
        for each in read_requirements(package, extras=_extras(package))
        if each.name in pins and pins[each.name] not in each.specifier
    ]
    assert outside == []


def test_upper_bounds_and_markers_do_not_hide_a_lower_bound() -> None:
    assert pin_lower_bound(Requirement("hydra-core>=1.3,<1.4")) == "hydra-core==1.3"
    assert (
        pin_lower_bound(Requirement("pyarrow>=15; python_version < '3.13'"))
        == 'pyarrow==15; python_version < "3.13"'
    )


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy==2.0", "numpy>=1,>=2"])
def test_a_requirement_without_one_lower_bound_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="has no lower bound"):
        pin_lower_bound(Requirement(line))


def test_highest_of_several_lower_bounds_is_pinned(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy>=1.9", "rich>=13", "temper-trainer>=0.1"]\n'
        '[project.optional-dependencies]\nfast = ["numpy>=1.26"]\n'
    )
    assert pin_lower_bounds(tmp_path) == ["numpy==1.9", "rich==13"]
    assert pin_lower_bounds(tmp_path, extras=["fast"], leave_out=["rich"]) == ["numpy==1.26"]


def test_each_python_version_has_its_own_lower_bound(tmp_path: Path) -> None:
    lines = [
        "core>=0.16,<0.17; python_version != '3.12'",
        "core>=0.19,<0.20; python_version == '3.12'",
    ]
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {lines}\n")
    assert sorted(pin_lower_bounds(tmp_path)) == [
        'core==0.16; python_version != "3.12"',
        'core==0.19; python_version == "3.12"',
    ]


def _list_required(package: str, *extras: str) -> set[str]:
    """Return all packages that a package of this repository requires, also through others here."""
    path = ROOT / "packages" / package
    project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    chosen = [line for extra in extras for line in project["optional-dependencies"][extra]]
    names = set[str]()
    for requirement in map(Requirement, [*project["dependencies"], *chosen]):
        names.add(requirement.name)
        if requirement.name.startswith("temper-"):
            names |= _list_required(requirement.name.removeprefix("temper-"), *requirement.extras)
    return names


@pytest.mark.parametrize("extra", ["workers", "workers-megatron"])
def test_old_workers_require_no_plotting_library(extra: str) -> None:
    required = _list_required("legacy-shim", extra)
    assert "temper-trainer" in required
    assert {"matplotlib", "tensorboard"} & required == set()


@pytest.mark.parametrize("extra", ["fsdp", "lora", "megatron"])
def test_each_engine_of_the_trainer_brings_the_libraries_of_a_first_run(extra: str) -> None:
    assert {"matplotlib", "tensorboard"} <= _list_required("trainer", extra)


def test_every_package_is_paired_with_the_siblings_it_requires() -> None:
    actual = list_sibling_pairs(PACKAGES)
    assert {
        "engine-api:engine-fsdp",
        "engine-fsdp:trainer",
        "engine-megatron:trainer",
        "trainer:legacy-shim",
    } <= set(actual)
    assert all(one != other for one, other in (pair.split(":") for pair in actual))
    assert len(set(actual)) == len(actual)
