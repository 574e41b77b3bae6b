"""Compare and suggest names, and import what ``package.module:name`` names."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from temper_engine_api.errors import ConfigError, format_install


def is_within(key: str, *blocks: str) -> bool:
    """Return True if a dotted key is one of the blocks, or is below one."""
    return key in blocks or key.startswith(tuple([f"{block}." for block in blocks]))


def list_blocks(key: str) -> list[str]:
    """Return a dotted key and all blocks that it is in.

    Example:
        >>> list_blocks("actor.engine.device")
        ['actor', 'actor.engine', 'actor.engine.device']
    """
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known name, after a space; empty if none is near.

    Example:
        >>> suggest_name("gpso", ["ppo", "gspo"])
        " Did you mean 'gspo'?"
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def is_import_path(name: str) -> bool:
    """Return True if a name is an import path and not a registered name."""
    return ":" in name


def import_object(path: str, *, key: str) -> Callable[..., Any]:
    """Import the function or class at an import path.

    Args:
        path: ``package.module:name``.
        key: Configuration key, for the message.

    Raises:
        ConfigError: If the module cannot be imported, or has no such function or class.
    """
    module, _, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
    # A user's module may raise anything while it is imported, also SystemExit: a script that parses
    # its arguments at the top level would end the run without a message.
    except (Exception, SystemExit) as error:
        is_absent = (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module}.".startswith(f"{error.name}.")
        )
        if module.endswith(".py") or "/" in module:
            own = module.removesuffix(".py").rpartition("/")[2]
            remedy = (
                f"write the module and not its file, {own}:{name}, with its folder in PYTHONPATH"
            )
        else:
            remedy = _suggest_remedy(module) if is_absent else "fix the module"
        raise ConfigError(
            f"{key} names module {module!r}, which cannot be imported ({type(error).__name__}: "
            f"{error}): {remedy}."
        ) from error
    members = vars(imported)
    member = members.get(name)
    if not callable(member):
        # Suggest only callables. A module also has imports and constants, which cannot be meant.
        known = [name for name, value in members.items() if callable(value)]
        raise ConfigError(
            f"{key} names {name!r} in {module}, which has no function or class of that name."
            f"{suggest_name(name, known)}"
        )
    imported_object: Callable[..., Any] = member
    return imported_object


def is_installed(module: str) -> bool:
    """Return True if a top-level module can be imported, without importing it."""
    spec = importlib.util.find_spec(module)
    # A namespace package, such as the folder /tmp/ray seen from /tmp, is not the library.
    return spec is not None and spec.origin is not None


def _suggest_remedy(absent: str) -> str:
    """Return how to make a missing module importable.

    A configuration translated from an old system may name functions in temper_legacy_shim.
    """
    if absent.partition(".")[0] == "temper_legacy_shim":
        return f"run {format_install('temper-legacy-shim')}"
    return "add the folder that contains it to PYTHONPATH"
