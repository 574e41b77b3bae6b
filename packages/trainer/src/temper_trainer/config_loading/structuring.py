"""Build the frozen dataclasses from plain values with cattrs; errors start with the dotted key."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from cattrs import (
    AttributeValidationNote,
    ClassValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, make_mapping_structure_fn

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config_loading.schema import Plain, find_block_class, find_item_class
from temper_trainer.settings.ranges import Range, find_range
from temper_trainer.settings.variants import Choice, Custom, find_choice

T = TypeVar("T")


def structure(values: Mapping[str, Plain], cls: type[T], *, engine_class: type[EngineConfig]) -> T:
    """Build a frozen configuration.

    Args:
        values: Nested plain values, defaults included.
        cls: Dataclass of the root.
        engine_class: Class to build for fields of type EngineConfig.

    Raises:
        ConfigError: One line per problem, each starting with its dotted key.
    """
    try:
        converter = _converter(engine_class)  # type: ignore[arg-type]  # mypy: a class is hashable
        return converter.structure(values, cls)
    except ClassValidationError as error:
        raise ConfigError("\n".join(_list_problems(error, path=""))) from error


def describe_type(annotation: object) -> str:
    """Return a type in a table's notation: ``whole number of at least 1 | null``."""
    return " | ".join(option.removeprefix("a ") for option in _list_options(annotation))


def describe_expected(annotation: object) -> str:
    """Return a type as the end of a sentence: ``a whole number of at least 1, or null``."""
    options = _list_options(annotation)
    if len(options) == 1:
        return options[0]
    # The comma keeps the last option apart from an "or" within the option before it.
    comma = "," if any(" or " in option or " and " in option for option in options) else ""
    if len(options) == 2 and options[1] == "null":
        comma = ","
    return f"{', '.join(options[:-1])}{comma} or {options[-1]}"


_WORDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}


def _list_options(annotation: object) -> list[str]:
    """Return a type's alternatives: its words, or a phrase for each kind of value."""
    if annotation is bool:
        return ["true", "false"]
    if annotation in _WORDS:
        return [_WORDS[annotation]]
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        [option] = _list_options(arguments[0])
        bounds = find_range(annotation)
        if bounds is None or bounds == Range():
            return [option]
        return [f"{option} {'of ' if str(bounds).startswith('at') else ''}{bounds}"]
    if get_origin(annotation) is Literal:
        return [str(argument) for argument in arguments]
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for argument in arguments for option in _list_options(argument)]
    if get_origin(annotation) is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return [f"a list of {count}values, each {describe_expected(arguments[0])}"]
    return ["a mapping from names to values"]


# cattrs compiles a function for each dataclass, which takes a fifth of the loading time.
@functools.cache
def _converter(engine_class: type[EngineConfig]) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook_func(
        lambda _: True, lambda value, annotation: _structure(converter, value, annotation)
    )
    # cattrs tries its own hooks for primitives before predicates, so these are registered by type.
    for primitive in (bool, int, float, str):
        converter.register_structure_hook(primitive, _structure_value)
    converter.register_structure_hook_factory(
        _is_block, lambda annotation: _block_hook(converter, annotation, engine_class=engine_class)
    )
    converter.register_structure_hook_factory(
        _is_mapping, lambda annotation: _mapping_hook(converter, annotation)
    )
    return converter


def _is_block(annotation: object) -> bool:
    return (
        isinstance(annotation, type)
        and dataclasses.is_dataclass(annotation)
        and find_choice(annotation) is None
    )


def _is_mapping(annotation: object) -> bool:
    return get_origin(annotation) in (dict, Mapping)


def _block_hook(
    converter: Converter, annotation: type[object], *, engine_class: type[EngineConfig]
) -> Callable[[object, type[object]], object]:
    if annotation is EngineConfig and engine_class is not EngineConfig:
        return lambda value, _: converter.structure(value, engine_class)
    build = make_dict_structure_fn(
        annotation, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
    )

    def hook(value: object, _: type[object]) -> object:
        if not isinstance(value, dict):
            raise ConfigError(f"is {value!r}, but must be a block of keys.")
        return build(value, annotation)

    return hook


def _mapping_hook(
    converter: Converter, annotation: Any
) -> Callable[[object, type[object]], object]:
    build = make_mapping_structure_fn(annotation, converter, detailed_validation=True)
    items = "values" if find_item_class(annotation) is None else "blocks"

    def hook(value: object, _: type[object]) -> object:
        if not isinstance(value, dict):
            raise ConfigError(f"is {value!r}, but must be a mapping from names to {items}.")
        return build(value, annotation)

    return hook


def _structure(converter: Converter, value: object, annotation: object) -> object:
    """Structure what is no block or mapping: a union, an optional block or a value."""
    if (choice := find_choice(annotation)) is not None:
        return _structure_variant(converter, value, choice)
    if (block := find_block_class(annotation)) is not None:
        return None if value is None else converter.structure(value, block)
    return _structure_value(value, annotation)


def _structure_variant(converter: Converter, value: object, choice: Choice) -> object:
    """Structure the variant that a block names; a name alone is a variant with its defaults."""
    if value is None and choice.is_optional:
        return None
    block = {"name": value} if isinstance(value, str) else value
    if not isinstance(block, dict):
        raise ConfigError(f"is {_show(value)}, but must be a name, or a block of keys with a name.")
    name = block.get("name", choice.union.default_name)
    cls = choice.find_class(name)
    if cls is None:
        raise ConfigError(choice.describe_unknown(name))
    if cls is not Custom:  # whose own field is the name
        block = {key: each for key, each in block.items() if key != "name"}
    return converter.structure(block, cls)


def _structure_value(value: object, annotation: object) -> object:
    bounds = find_range(annotation)
    try:
        read = _read(value, annotation)
    except _WrongTypeError:
        expected = describe_expected(annotation)
        is_list = isinstance(value, str) and expected.startswith(
            ("a list", "text, a list", "text or a list")
        )
        hint = f" A list is written [{value}]." if is_list else ""
        end = "."
        if (
            isinstance(value, float)
            and value.is_integer()
            and "whole number" in expected
            and (bounds is None or value in bounds)
        ):
            end = f": write {value:.0f}."  # Hydra reads 1e3 as a float
        raise ConfigError(f"is {_show(value)}, but must be {expected}{end}{hint}") from None
    if bounds is not None and isinstance(read, (int, float)) and read not in bounds:
        raise ConfigError(f"is {read}, but must be {bounds}.")
    return read


class _WrongTypeError(Exception):
    """A value does not fit a type."""


def _read(value: object, annotation: object) -> object:
    """Return the value converted to the type `annotation`.

    1.5 is not an int, 1 is a float, and "true" is not a bool.

    Raises:
        _WrongTypeError: If it does not fit.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _read(value, arguments[0])
    # Types are compared, because bool is a subclass of int: `true` would become 1.0.
    if annotation is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    if annotation in (bool, int, str, type(None)) and type(value) is annotation:
        return value
    if origin is Literal and any(
        type(value) is type(choice) and value == choice for choice in arguments
    ):
        return value
    if origin in (Union, types.UnionType):
        accepted = []
        for argument in arguments:
            with contextlib.suppress(_WrongTypeError):
                accepted.append(_read(value, argument))
        # If several members of the union accept the value, prefer the member whose type is
        # type(value): in int | float, 1 stays an int.
        accepted.sort(key=lambda item: type(item) is not type(value))
        if accepted:
            return accepted[0]
    if origin is tuple and isinstance(value, (list, tuple)):
        members = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(members) == len(value):
            return tuple(map(_read, value, members))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(item, arguments[1]) for key, item in value.items()}
    raise _WrongTypeError


def _show(value: object) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else repr(value)
    )


def _list_problems(error: BaseException, *, path: str) -> list[str]:
    """Return the problems of one block, each with its dotted key in front."""
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        collected = []
        for inner in error.exceptions:
            collected += _list_problems(inner, path=_extend_path(inner, path=path))
        return collected
    if isinstance(error, ForbiddenExtraKeysError):
        return [
            f"{_join(path, name)}: there is no such key." for name in sorted(error.extra_fields)
        ]
    # cattrs raises KeyError for a field that has neither a value nor a default.
    if isinstance(error, KeyError):
        return [f"{path} is not set and has no default: set it."]
    message = str(error)
    # Messages about a type or a missing name get the key in front; those of a dataclass's checks
    # already name their key.
    if message.startswith(("is ", "has no name")):
        return [f"{path} {message}"]
    if message.startswith((f"{path}.", f"{path}:", f"{path} ")) or not path:
        return [message]
    return [f"{path}: {message}"]


def _extend_path(error: BaseException, *, path: str) -> str:
    for note in error.__dict__.get("__notes__", []):
        if isinstance(note, AttributeValidationNote):
            return _join(path, note.name)
        if isinstance(note, IterableValidationNote):
            return _join(path, str(note.index))
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
