"""Old module paths for code that cannot be edited; they exist after ``install()``."""

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib import resources
from types import ModuleType

from temper_legacy_shim.errors import UsageError

PACKAGE = "verl"
"""The import name of the older generation."""


def _read_table() -> dict[str, dict[str, str]]:
    """Return the names that each old module offers, in an order that makes parents first."""
    modules: dict[str, dict[str, str]] = {}
    text = resources.files(__package__).joinpath("data/old_paths.tsv").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        module, name, target = line.split("\t")
        offers = modules.setdefault(module, {})
        if name:
            offers[name] = target
    return modules


MODULES = _read_table()
"""Names of each old module, with the location here: ``module:name``."""


class OldModule(ModuleType):
    """A module of the old name; its classes are looked up when they are asked for."""

    def __init__(self, name: str, offers: dict[str, str]) -> None:
        super().__init__(
            name,
            f"Stands in for the {name} of the older generation, by temper_legacy_shim.install().",
        )
        self.__path__: list[str] = []
        self.__all__ = sorted(offers)
        self._offers = offers

    def __getattr__(self, name: str) -> object:
        if name not in self._offers:
            raise AttributeError(
                f"{self.__name__} has no {name!r} here: temper_legacy_shim.install() offers "
                f"{', '.join(self._offers) or 'only modules below it'}; see "
                "docs/migration/workers.md."
            )
        module, _, attribute = self._offers[name].partition(":")
        return getattr(importlib.import_module(module), attribute)


def install(*, force: bool = False) -> None:
    """Make old module paths importable in this process, with the deprecated classes.

    Args:
        force: also where the older package is installed or already imported, whose modules of these
            names are then hidden.

    Raises:
        UsageError: the older package is there, and ``force`` is False.
    """
    if is_installed():
        return
    imported = sorted(name for name in MODULES if name in sys.modules)
    if not force and (imported or importlib.util.find_spec(PACKAGE) is not None):
        where = "was already imported" if imported else "is installed here"
        raise UsageError(
            f"{PACKAGE} itself {where}, and its own classes would be hidden: uninstall it, or call "
            "install(force=True) before anything imports it."
        )
    for name, offers in MODULES.items():
        module = OldModule(name, offers)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def uninstall() -> None:
    """Remove the old paths; imported names stay usable."""
    for name in MODULES:
        if isinstance(sys.modules.get(name), OldModule):
            del sys.modules[name]


def is_installed() -> bool:
    """Check if ``install()`` was called."""
    return isinstance(sys.modules.get(PACKAGE), OldModule)
