"""The lowest versions that a package declares, as pins: what `nox -s oldest` installs. Standard library and packaging alone."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def declared(package: Path, *, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a package and some of its extras require of others; our own packages are left out."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    for line in [*project["dependencies"], *(line for extra in extras for line in optional[extra])]:
        requirement = Requirement(line)
        if not requirement.name.startswith("temper-"):
            yield requirement


def sibling_requirements(package: Path) -> Iterator[Requirement]:
    """What a package and its extras require of our own packages; of itself, where an extra takes in another one, nothing."""
    return sibling_requirements_in((package / "pyproject.toml").read_text())


def sibling_requirements_in(pyproject: str) -> Iterator[Requirement]:
    """The same, from the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        if requirement.name.startswith("temper-") and requirement.name != project["name"]:
            yield requirement


def pairs(packages: Iterable[Path]) -> list[str]:
    """Every package with every sibling that it requires, as SIBLING:PACKAGE."""
    return [
        f"{name.removeprefix('temper-')}:{path.name}"
        for path in packages
        for name in sorted({r.name for r in sibling_requirements(path)})
    ]


def floor(requirement: Requirement) -> str:
    """A requirement pinned at its lower bound.

    Raises:
        ValueError: it has none, so nobody knows which version it was tried with.
    """
    bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(
            f"{requirement} has no lower bound: write {requirement.name}>=X, the oldest version that works."
        )
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def floors(
    package: Path, *, extras: Iterable[str] = (), leave_out: Iterable[str] = ()
) -> list[str]:
    """The pins of a package and some of its extras; where several of them ask for one distribution on the same machines, at the highest
    floor.
    """
    found: dict[tuple[str, str], str] = {}
    for requirement in declared(package, extras=extras):
        key, pin = (requirement.name, str(requirement.marker or "")), floor(requirement)
        if key not in found or _version(pin) > _version(found[key]):
            found[key] = pin
    return [pin for (name, _), pin in sorted(found.items()) if name not in set(leave_out)]


def _version(pin: str) -> Version:
    return Version(pin.partition("==")[2].partition(";")[0])
