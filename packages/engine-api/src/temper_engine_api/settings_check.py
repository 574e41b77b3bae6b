"""Words and whole numbers of a configuration, against the types of its fields. Importing this needs no torch."""

from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from temper_engine_api.errors import ConfigError


def check_field_types(settings: object, *, prefix: str = "") -> None:
    """Refuse a word that is not among those of a Literal field, and a fraction in a field of whole numbers.

    Args:
        settings: an instance of a dataclass.
        prefix: what stands before its fields' names in a configuration, such as ``schedule.``.

    Raises:
        ConfigError: it names the key, the value, and what it may be.
    """
    kind: Any = type(settings)
    for name, words, is_number, may_be_none in _checked(kind):
        value = getattr(settings, name)
        if value is None and may_be_none:
            continue
        if words and value not in words:
            choices = [*(repr(word) for word in words), *(["null"] if may_be_none else [])]
            raise ConfigError(f"{prefix}{name} is {value!r}, but must be {_either(choices)}.")
        if is_number and not (isinstance(value, Real) and float(value).is_integer()):
            raise ConfigError(
                f"{prefix}{name} is {value!r}, but must be a whole number{' or null' if may_be_none else ''}."
            )


@cache
def _checked(kind: type) -> tuple[tuple[str, tuple[object, ...], bool, bool], ...]:
    """(name, words, whether it is a whole number, whether it may be None) of those fields of a class that have such a type."""
    found = []
    for name, hint in get_type_hints(kind).items():
        members = {hint} if get_origin(hint) is Literal else set(get_args(hint)) or {hint}
        words = tuple(
            word for member in members if get_origin(member) is Literal for word in get_args(member)
        )
        is_number = int in members and members <= {int, NoneType}
        if words or is_number:
            found.append((name, words, is_number, NoneType in members))
    return tuple(found)


def _either(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
