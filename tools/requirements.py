"""Read requirements from pyproject.toml, and the lower bounds that `nox -s oldest` installs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def read_requirements(package: Path, *, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yield the third-party requirements of a package and some of its extras."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    for line in [*project["dependencies"], *(line for extra in extras for line in optional[extra])]:
        requirement = Requirement(line)
        if not requirement.name.startswith("temper-"):
            yield requirement


def sibling_requirements(package: Path) -> Iterator[Requirement]:
    """Yield the requirements of a package and its extras that name our other packages."""
    return sibling_requirements_in((package / "pyproject.toml").read_text())


def sibling_requirements_in(pyproject: str) -> Iterator[Requirement]:
    """Yield the requirements that name our other packages, from the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        if requirement.name.startswith("temper-") and requirement.name != project["name"]:
            yield requirement


def list_sibling_pairs(packages: Iterable[Path]) -> list[str]:
    """Return `SIBLING:PACKAGE` for each of our packages that a package requires."""
    return [
        f"{name.removeprefix('temper-')}:{path.name}"
        for path in packages
        for name in sorted({r.name for r in sibling_requirements(path)})
    ]


def pin_lower_bound(requirement: Requirement) -> str:
    """Pin a requirement at its lower bound.

    Raises:
        ValueError: The requirement has no lower bound, or more than one.
    """
    bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(
            f"{requirement} has no lower bound: write {requirement.name}>=X with the oldest "
            "version that works."
        )
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def pin_lower_bounds(
    package: Path, *, extras: Iterable[str] = (), leave_out: Iterable[str] = ()
) -> list[str]:
    """Return the lower bounds of a package and some of its extras as pins.

    If several of them require a distribution with the same marker, the highest bound is taken.
    """
    highest: dict[tuple[str, str], str] = {}
    for requirement in read_requirements(package, extras=extras):
        key, pin = (requirement.name, str(requirement.marker or "")), pin_lower_bound(requirement)
        if key not in highest or _version(pin) > _version(highest[key]):
            highest[key] = pin
    return [pin for (name, _), pin in sorted(highest.items()) if name not in set(leave_out)]


def _version(pin: str) -> Version:
    return Version(pin.partition("==")[2].partition(";")[0])
