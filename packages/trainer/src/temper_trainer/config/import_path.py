"""What a user wrote, found by its import path ``package.module:name``."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from temper_engine_api.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Whether a name of the configuration is an import path and no registered name."""
    return ":" in name


def import_object(path: str, *, key: str) -> Callable[..., Any]:
    """The function or class at an import path.

    Args:
        path: ``package.module:name``.
        key: of the configuration, for the sentence.

    Raises:
        ConfigError: the module can't be imported, or has no such function or class.
    """
    module, _, name = path.partition(":")
    try:
        holder = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything while it is imported
        is_absent = (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module}.".startswith(f"{error.name}.")
        )
        advice = _advice(module) if is_absent else "mend the module"
        raise ConfigError(
            f"{key} names module {module!r}, which can't be imported ({type(error).__name__}: {error}): {advice}."
        ) from error
    members = vars(holder)
    found = members.get(name)
    if not callable(found):
        near = difflib.get_close_matches(
            name, [known for known, value in members.items() if callable(value)], n=1
        )
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ConfigError(
            f"{key} names {name!r} in {module}, which has no such function or class{hint}"
        )
    named: Callable[..., Any] = found
    return named


def _advice(absent: str) -> str:
    """What a module that is not there asks for; translated configurations name those of the migration layer."""
    if absent.partition(".")[0] == "temper_legacy_shim":
        return "pip install temper-legacy-shim"
    return "put the folder that holds it on PYTHONPATH"
