"""Type checks of Literal and int fields of configuration dataclasses. Does not import torch."""

from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from temper_engine_api.errors import ConfigError


def check_field_types(settings: object, *, prefix: str = "") -> None:
    """Check that Literal fields have an allowed value and int fields a whole number.

    Args:
        settings: Dataclass instance.
        prefix: Prefix of its keys in the configuration, such as `schedule.`.

    Raises:
        ConfigError: Names the key, the value and the allowed values.
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
    """Return (name, literals, is_number, may_be_none) of the Literal and int fields of a class."""
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
