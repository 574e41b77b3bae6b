"""Find installed engines by name through entry points.

Listing engines imports nothing; loading one imports it. An engine's package declares in its
`pyproject.toml`:

    [project.entry-points."temper.engines"]
    fsdp = "temper_engine_fsdp.engine:FSDPEngine"
    [project.entry-points."temper.engine_configs"]
    fsdp = "temper_engine_fsdp.config:FSDPConfig"

The second entry point names a module that does not import torch, so that a configuration can be
checked quickly. A third group, `temper.conformance_layouts`, is optional; see `layout`. An engine
that requires another version of temper-engine-api is refused before it is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from temper_engine_api.contract_version import check_contract
from temper_engine_api.errors import EngineNotFoundError, format_install
from temper_engine_api.layout import Layout
from temper_engine_api.specs import EngineConfig

if TYPE_CHECKING:
    from temper_engine_api.engine import BaseEngine

ENGINES = "temper.engines"
"""Entry-point group of engine classes."""
ENGINE_CONFIGS = "temper.engine_configs"
"""Entry-point group of configuration classes."""
CONFORMANCE_LAYOUTS = "temper.conformance_layouts"
"""Entry-point group of layouts for the conformance tests."""

_PUBLISHED_ENGINES = ("fsdp", "megatron")
"""Engines of Temper; `temper-engine-NAME` is the package of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """Entry point for an installed engine, not imported yet."""

    name: str
    """Name to use as `model_engine`."""
    target: str
    """Import path of the object, as `module:Class`."""
    distribution: str
    """Name and version of the distribution that provides it."""


def list_engines() -> list[EngineEntry]:
    """List the installed engines by name without importing them."""
    return [
        EngineEntry(name=name, target=point.value, distribution=_format_distribution(point))
        for name, point in sorted(_find_entry_points(ENGINES).items())
    ]


def find_import_errors() -> dict[str, str]:
    """Import every installed engine and return the error messages of those that fail, by name."""
    faults = {}
    for name in _find_entry_points(ENGINES):
        try:
            load_engine_class(name)
        except EngineNotFoundError as error:
            faults[name] = str(error)
    return faults


def load_engine_class(name: str) -> "type[BaseEngine]":
    """Import and return the engine class with this name.

    Raises:
        EngineNotFoundError: If there is none, its import fails, or it is not a BaseEngine.
        ContractVersionError: If it is built for another version of temper-engine-api.
    """
    # Imports torch, which a list of engines does not need.
    from temper_engine_api.engine import BaseEngine

    loaded = _load_class(ENGINES, name)
    if not issubclass(loaded, BaseEngine):
        raise EngineNotFoundError(
            f"engine {name!r} is {loaded!r}, which is not a subclass of {BaseEngine.__name__}: "
            "report this to the engine's maintainers."
        )
    return loaded


def load_engine_config_class(name: str) -> type[EngineConfig]:
    """Import and return an engine's configuration class, without importing the engine.

    Raises:
        EngineNotFoundError: If there is none, its import fails, or it is not an EngineConfig.
        ContractVersionError: If it is built for another version of temper-engine-api.
    """
    loaded = _load_class(ENGINE_CONFIGS, name)
    if not issubclass(loaded, EngineConfig):
        raise EngineNotFoundError(
            f"the configuration of engine {name!r} is {loaded!r}, which is not a subclass of "
            f"{EngineConfig.__name__}: report this to the engine's maintainers."
        )
    return loaded


def load_conformance_layouts(name: str) -> tuple[Layout, ...]:
    """Return an engine's layouts for the conformance tests; empty if it declares none.

    Raises:
        EngineNotFoundError: If the entry point can't be imported or is not a tuple of layouts.
    """
    point = _find_entry_points(CONFORMANCE_LAYOUTS).get(name)
    return (
        ()
        if point is None
        else check_layouts(
            _load_entry_point(point),
            source=f"entry point {name!r} of {_format_distribution(point)}",
        )
    )


def check_layouts(layouts: object, *, source: str) -> tuple[Layout, ...]:
    """Return the object as a tuple of layouts after checking its types and names.

    Raises:
        EngineNotFoundError: If it is not a tuple of layouts, or a name is repeated.
    """
    if not isinstance(layouts, tuple) or not all(isinstance(layout, Layout) for layout in layouts):
        raise EngineNotFoundError(
            f"{source} is {layouts!r}, which is not a tuple of {Layout.__name__}: report this to "
            "the engine's maintainers."
        )
    names = [layout.name for layout in layouts]
    if len(set(names)) < len(names):
        raise EngineNotFoundError(
            f"{source} has repeated layout names: {', '.join(names)}. Report this to the engine's "
            "maintainers."
        )
    return layouts


def _load_class(group: str, name: str) -> type[object]:
    points = _find_entry_points(group)
    if name not in points:
        installed = ", ".join(sorted(points)) or "none"
        remedy = (
            f"Install it with {format_install(f'temper-engine-{name}')}."
            if name in _PUBLISHED_ENGINES
            else f"Correct the name, or install a package with an entry point in {group!r}; "
            f"packages of Temper have the engines {' and '.join(_PUBLISHED_ENGINES)}."
        )
        raise EngineNotFoundError(
            f"no engine is called {name!r}; installed are: {installed}. {remedy}"
        )
    point = points[name]
    loaded = _load_entry_point(point)
    if not isinstance(loaded, type):
        raise EngineNotFoundError(
            f"entry point {name!r} of {_format_distribution(point)} is {loaded!r}, which is not a "
            "class: report this to the engine's maintainers."
        )
    return loaded


def _load_entry_point(point: EntryPoint) -> object:
    if point.dist is not None:
        check_contract(point.dist, engine=point.name)
    try:
        loaded: object = point.load()
    except (ImportError, AttributeError, OSError) as error:
        raise EngineNotFoundError(
            f"engine {point.name!r} of {_format_distribution(point)} can't be imported from "
            f"{point.value}: {error}. Install what is missing, or another version of it."
        ) from error
    return loaded


def _find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _format_distribution(point: EntryPoint) -> str:
    return (
        f"{point.dist.name} {point.dist.version}"
        if point.dist is not None
        else "an unknown distribution"
    )
