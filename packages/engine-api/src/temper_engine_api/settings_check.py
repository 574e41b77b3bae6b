"""Check settings: types of fields, and folders to write to. Does not import torch."""

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from temper_engine_api.errors import ConfigError

logger = logging.getLogger(__name__)

_PROBE = ".temper-check-"
"""Name prefix for folders that are made only to check that this is possible."""
_PROBE_FILE = "data"


def find_write_error(folder: str | Path) -> OSError | None:
    """Return the error that creating or writing a folder would raise, or None.

    It creates a folder with a file there, or in the nearest parent that exists, and removes both.
    Reading the permissions would not be enough: they do not apply to root, and some file systems,
    such as /proc, accept no files.
    """
    parent = Path(folder)
    try:
        try:
            parent.lstat()
        except (FileNotFoundError, NotADirectoryError):
            while not os.path.lexists(parent):
                parent = parent.parent
        # A process that was killed right here left its folder. Removing that of a living process
        # does it no harm either.
        for left in parent.glob(f"{_PROBE}*"):
            _remove_probe(left)
        probe = parent / f"{_PROBE}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        probe.mkdir(mode=0o700)
        try:
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                # Some full disks have room for an entry of a folder, but not for a block.
                (probe / _PROBE_FILE).write_bytes(bytes(4096))
        finally:
            _remove_probe(probe)
        return None
    except OSError as error:
        return error


def _remove_probe(folder: Path) -> None:
    """Remove a folder of `find_write_error`, unless it has other files or is another user's."""
    with contextlib.suppress(OSError):
        (folder / _PROBE_FILE).unlink(missing_ok=True)
        folder.rmdir()


def check_number_ranges(config: object, *, source: str) -> None:
    """Check that numbers in a Hugging Face config are in their range.

    Most config classes accept any number. A model without layers would be built, and others compute
    NaN or fail in the first training pass.

    Args:
        config: The config of a text model.
        source: Start of the message: the setting or file that has the numbers.

    Raises:
        ConfigError: If one is not.
    """
    for name, number in _iterate_numbers(vars(config)):
        for pattern, is_allowed, words in _NUMBER_RANGES:
            if pattern.fullmatch(name) and not is_allowed(number):
                raise ConfigError(f"{source}: {name} is {number}, but must be {words}.")


_NUMBER_RANGES: tuple[tuple[re.Pattern[str], Callable[[float], bool], str], ...] = (
    (
        re.compile("num_hidden_layers|num_layers|n_layers?"),
        lambda number: number >= 1,
        "at least 1",
    ),
    (re.compile("rope_theta"), lambda number: number > 0, "above 0"),
    (re.compile(r"\w*(dropout|pdrop)\w*"), lambda number: 0 <= number <= 1, "between 0 and 1"),
    (re.compile(r"\w*norm_eps(ilon)?"), lambda number: number >= 0, "at least 0"),
)
"""Patterns of names, and the numbers that are allowed there. NaN is never allowed."""


def _iterate_numbers(fields: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield names and numbers, also those in mappings, such as rope_parameters."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _iterate_numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(name), value


def warn_about_undeclared_keys(config: object, *, architecture: Mapping[str, object]) -> None:
    """Log a warning about architecture keys that the config class does not declare.

    They are not refused: transformers keeps any key, and some models read keys that their config
    class does not declare, such as head_dim.

    Args:
        config: The config that was built from the architecture.
        architecture: The fields that the user set.
    """
    default = type(config)()
    # A key that is renamed or merged into another one, such as rope_theta, is no attribute later.
    undeclared = [key for key in architecture if hasattr(config, key) and not hasattr(default, key)]
    for key in undeclared:
        logger.warning(
            "model.architecture.%s is not a field of %s: it has an effect only if the model's code "
            "reads it. Check the spelling.",
            key,
            type(config).__name__,
        )


def check_head_counts(config: object, *, architecture: Mapping[str, object]) -> None:
    """Check that the attention head counts in a Hugging Face config fit each other.

    The configs of some model types check it themselves; with others the first forward pass fails.

    Args:
        config: The config; fields that it lacks are not checked.
        architecture: The fields that the user set.

    Raises:
        ConfigError: If they do not fit each other.
    """
    hidden, heads, kv_heads = (
        getattr(config, name, None)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    for name, size in (("num_attention_heads", heads), ("hidden_size", hidden)):
        if size < 1:
            raise ConfigError(f"model.architecture.{name} is {size}, but must be at least 1.")
    # In `vars`, because configs of transformers with a size per layer refuse to be asked for one.
    is_derived = vars(config).get("head_dim") in (None, hidden // heads)
    if hidden % heads and is_derived and "head_dim" not in architecture:
        raise ConfigError(
            f"model.architecture.num_attention_heads is {heads}, but must divide hidden_size "
            f"{hidden}: change one of them, or set head_dim."
        )
    if isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        raise ConfigError(
            f"model.architecture.num_attention_heads is {heads}, but must be a multiple of "
            f"num_key_value_heads {kv_heads}: change one of them."
        )


def check_yarn_head_dim(config: object, *, source: str) -> None:
    """Check that a Hugging Face config with yarn has a head_dim, if its class has that field.

    transformers multiplies with it, also where it is None, which is Mixtral's default.

    Args:
        config: The config of a text model.
        source: Start of the message: the setting or file that has the config.

    Raises:
        ConfigError: If it is None.
    """
    # In `vars`, because configs of transformers with a size per layer refuse to be asked for one.
    fields = vars(config)
    if "head_dim" not in fields or fields["head_dim"] is not None:
        return
    rope = fields.get("rope_parameters") or {}
    kinds = (rope, *(value for value in rope.values() if isinstance(value, Mapping)))
    if any(kind.get("rope_type") == "yarn" for kind in kinds):
        head_dim = fields["hidden_size"] // fields["num_attention_heads"]
        raise ConfigError(
            f"{source}: the rope_type is yarn and head_dim is not set, with which transformers "
            f"cannot compute the model's angles: set head_dim to {head_dim}."
        )


def check_field_types(settings: object, *, prefix: str = "") -> None:
    """Check that Literal fields have an allowed value and int fields a whole number.

    Args:
        settings: Dataclass instance.
        prefix: Prefix of its keys in the configuration, such as `schedule.`.

    Raises:
        ConfigError: If a value is not allowed; names the key, the value and the allowed values.
    """
    kind: Any = type(settings)
    for name, words, is_number, may_be_none in _list_checked_fields(kind):
        value = getattr(settings, name)
        if value is None and may_be_none:
            continue
        if words and value not in words:
            choices = [*(repr(word) for word in words), *(["null"] if may_be_none else [])]
            raise ConfigError(f"{prefix}{name} is {value!r}, but must be {_join_with_or(choices)}.")
        if is_number and not (isinstance(value, Real) and float(value).is_integer()):
            raise ConfigError(
                f"{prefix}{name} is {value!r}, but must be a whole number"
                f"{' or null' if may_be_none else ''}."
            )


@cache
def _list_checked_fields(kind: type) -> tuple[tuple[str, tuple[object, ...], bool, bool], ...]:
    """Return (name, literals, is_number, may_be_none) for a class's Literal and int fields."""
    checked_fields = []
    for name, hint in get_type_hints(kind).items():
        members = {hint} if get_origin(hint) is Literal else set(get_args(hint)) or {hint}
        words = tuple(
            word for member in members if get_origin(member) is Literal for word in get_args(member)
        )
        is_number = int in members and members <= {int, NoneType}
        if words or is_number:
            checked_fields.append((name, words, is_number, NoneType in members))
    return tuple(checked_fields)


def _join_with_or(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
