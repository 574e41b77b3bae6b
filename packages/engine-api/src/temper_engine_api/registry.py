"""Engines by name, through the entry points of whatever is installed. Listing imports nothing; looking one up imports it.

An engine's package declares in its ``pyproject.toml``:

    [project.entry-points."temper.engines"]
    fsdp = "temper_engine_fsdp.engine:FSDPEngine"
    [project.entry-points."temper.engine_configs"]
    fsdp = "temper_engine_fsdp.config:FSDPConfig"

The second names a module without torch, so that a configuration can be checked before anything heavy is imported. A third group,
``temper.conformance_layouts``, is optional; see ``layout``. What the distribution requires of temper-engine-api is the contract it is
built for: where another one is installed, the engine is refused before anything of it is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from temper_engine_api.contract_version import check_contract
from temper_engine_api.errors import EngineNotFoundError
from temper_engine_api.layout import Layout
from temper_engine_api.specs import EngineConfig

if TYPE_CHECKING:
    from temper_engine_api.engine import BaseEngine

ENGINES = "temper.engines"
"""Entry-point group of engine classes."""
ENGINE_CONFIGS = "temper.engine_configs"
"""Entry-point group of their configurations."""
CONFORMANCE_LAYOUTS = "temper.conformance_layouts"
"""Entry-point group of their tables of layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """An installed engine, not imported."""

    name: str
    """As in ``model_engine``."""
    target: str
    """``module:Class``."""
    distribution: str
    """The distribution that brings it, with its version."""


def list_engines() -> list[EngineEntry]:
    """Every installed engine by name; nothing is imported."""
    return [
        EngineEntry(name=name, target=point.value, distribution=_distribution(point))
        for name, point in sorted(_points(ENGINES).items())
    ]


def find_import_errors() -> dict[str, str]:
    """Import every installed engine: the reason by name of each that can't be."""
    faults = {}
    for name in _points(ENGINES):
        try:
            load_engine_class(name)
        except EngineNotFoundError as error:
            faults[name] = str(error)
    return faults


def load_engine_class(name: str) -> "type[BaseEngine]":
    """The engine of that name, imported.

    Raises:
        EngineNotFoundError: none is installed under that name, its import failed, or it is no BaseEngine.
        ContractVersionError: it is built for another version of the contract.
    """
    from temper_engine_api.engine import BaseEngine  # torch, which listing must not need

    loaded = _load(ENGINES, name)
    if not issubclass(loaded, BaseEngine):
        raise EngineNotFoundError(
            f"engine {name!r} gives {loaded!r}, which is no {BaseEngine.__name__}: tell its authors."
        )
    return loaded


def load_engine_config_class(name: str) -> type[EngineConfig]:
    """The configuration of the engine of that name; the engine itself is not imported.

    Raises:
        EngineNotFoundError: none is installed under that name, its import failed, or it is no EngineConfig.
        ContractVersionError: it is built for another version of the contract.
    """
    loaded = _load(ENGINE_CONFIGS, name)
    if not issubclass(loaded, EngineConfig):
        raise EngineNotFoundError(
            f"engine {name!r} is configured by {loaded!r}, which is no {EngineConfig.__name__}: tell its authors."
        )
    return loaded


def load_conformance_layouts(name: str) -> tuple[Layout, ...]:
    """The layouts that the engine of that name offers to the conformance kit; none where it has no such entry point.

    Raises:
        EngineNotFoundError: the entry point can't be imported, or gives no tuple of layouts with names of their own.
    """
    point = _points(CONFORMANCE_LAYOUTS).get(name)
    return (
        ()
        if point is None
        else check_layouts(_import(point), source=f"entry point {name!r} of {_distribution(point)}")
    )


def check_layouts(found: object, *, source: str) -> tuple[Layout, ...]:
    """A table of layouts as somebody wrote it, checked.

    Raises:
        EngineNotFoundError: it is no tuple of layouts, or two of them have one name.
    """
    if not isinstance(found, tuple) or not all(isinstance(layout, Layout) for layout in found):
        raise EngineNotFoundError(
            f"{source} gives {found!r}, which is no tuple of {Layout.__name__}: tell its authors."
        )
    names = [layout.name for layout in found]
    if len(set(names)) < len(names):
        raise EngineNotFoundError(
            f"{source} gives layouts with one name twice: {', '.join(names)}. Tell its authors."
        )
    return found


def _load(group: str, name: str) -> type[object]:
    points = _points(group)
    if name not in points:
        installed = ", ".join(sorted(points)) or "none"
        raise EngineNotFoundError(
            f"no engine is called {name!r}; installed are: {installed}. Install one with `pip install temper-engine-fsdp` "
            f"(fsdp) or `pip install temper-engine-megatron` (megatron); other engines come with their entry point in {group!r}."
        )
    point = points[name]
    loaded = _import(point)
    if not isinstance(loaded, type):
        raise EngineNotFoundError(
            f"entry point {name!r} of {_distribution(point)} gives {loaded!r}, which is no class: tell its authors."
        )
    return loaded


def _import(point: EntryPoint) -> object:
    if point.dist is not None:
        check_contract(point.dist, engine=point.name)
    try:
        loaded: object = point.load()
    except (ImportError, AttributeError, OSError) as error:
        raise EngineNotFoundError(
            f"engine {point.name!r} of {_distribution(point)} can't be imported from {point.value}: {error}. "
            "Install what is missing, or another version of it."
        ) from error
    return loaded


def _points(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _distribution(point: EntryPoint) -> str:
    return (
        f"{point.dist.name} {point.dist.version}"
        if point.dist is not None
        else "an unknown distribution"
    )
