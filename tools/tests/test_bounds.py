"""Check that `oldest` can install every requirement, and that pins are within declared bounds."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.bounds import declared, floor, floors, pairs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def _extras(package: Path) -> list[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return list(project.get("optional-dependencies", {}))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_requirement_has_a_lower_bound(package: Path) -> None:
    pins = floors(package, extras=_extras(package))
    wanted = {requirement.name for requirement in declared(package, extras=_extras(package))}
    assert {pin.partition("==")[0] for pin in pins} == wanted


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_everyday_pins_lie_within_what_is_declared(package: Path) -> None:
    lines = (
        line.partition("#")[0].strip()
        for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    )
    pins = dict(line.split("==") for line in lines if line)
    outside = [
        f"{each} leaves out {pins[each.name]}"
        for each in declared(package, extras=_extras(package))
        if each.name in pins and pins[each.name] not in each.specifier
    ]
    assert outside == []


def test_upper_bounds_and_markers_do_not_hide_a_floor() -> None:
    assert floor(Requirement("hydra-core>=1.3,<1.4")) == "hydra-core==1.3"
    assert (
        floor(Requirement("pyarrow>=15; python_version < '3.13'"))
        == 'pyarrow==15; python_version < "3.13"'
    )


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy==2.0", "numpy>=1,>=2"])
def test_a_requirement_without_one_lower_bound_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="has no lower bound"):
        floor(Requirement(line))


def test_the_highest_floor_of_several_counts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy>=1.9", "rich>=13", "temper-trainer>=0.1"]\n'
        '[project.optional-dependencies]\nfast = ["numpy>=1.26"]\n'
    )
    assert floors(tmp_path) == ["numpy==1.9", "rich==13"]
    assert floors(tmp_path, extras=["fast"], leave_out=["rich"]) == ["numpy==1.26"]


def test_each_python_has_a_floor_of_its_own(tmp_path: Path) -> None:
    lines = [
        "core>=0.16,<0.17; python_version != '3.12'",
        "core>=0.19,<0.20; python_version == '3.12'",
    ]
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {lines}\n")
    assert sorted(floors(tmp_path)) == [
        'core==0.16; python_version != "3.12"',
        'core==0.19; python_version == "3.12"',
    ]


def test_every_package_is_paired_with_what_it_requires_of_ours() -> None:
    found = pairs(PACKAGES)
    assert {
        "engine-api:engine-fsdp",
        "engine-fsdp:trainer",
        "engine-megatron:trainer",
        "trainer:legacy-shim",
    } <= set(found)
    assert all(one != other for one, other in (pair.split(":") for pair in found))
    assert len(set(found)) == len(found)
