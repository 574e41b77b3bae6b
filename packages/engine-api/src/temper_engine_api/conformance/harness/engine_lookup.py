"""Find engines by name: an entry point of the group ``temper.engines``, or ``module:Class``."""

from importlib import import_module

from temper_engine_api import registry
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineNotFoundError
from temper_engine_api.layout import Layout

MODULE_TABLE = "CONFORMANCE_LAYOUTS"
"""Module attribute with the layouts of an engine given as ``module:Class``."""


def load_engine_class(name: str) -> type[BaseEngine]:
    """Import the engine class of that name.

    Raises:
        EngineNotFoundError: If no engine has that name, or the class does not derive from
            BaseEngine.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        return registry.load_engine_class(name)
    try:
        engine = vars(import_module(module)).get(attribute)
    except ModuleNotFoundError as error:
        raise EngineNotFoundError(
            f"--engine {name!r} names a module which cannot be imported: {error}."
        ) from error
    if not isinstance(engine, type) or not issubclass(engine, BaseEngine):
        raise EngineNotFoundError(
            f"--engine {name!r} names {engine!r}, expected a class that derives from "
            "temper_engine_api.engine.BaseEngine."
        )
    return engine


def load_layouts(name: str) -> tuple[Layout, ...]:
    """Return the layouts that an engine offers.

    They come from its entry point, or from CONFORMANCE_LAYOUTS in its module.

    Raises:
        EngineNotFoundError: If they are not a tuple of layouts.
    """
    module, separator, _ = name.partition(":")
    if not separator:
        return registry.load_conformance_layouts(name)
    return registry.check_layouts(
        vars(import_module(module)).get(MODULE_TABLE, ()), source=f"{MODULE_TABLE} of {module}"
    )
