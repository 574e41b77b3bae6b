"""The configuration's dataclasses seen as a tree of dotted keys: which exist, which are blocks, and their defaults as to_plain values."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Union, get_args, get_origin

from temper_engine_api.specs import EngineConfig

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What YAML and JSON can say."""

ANY_NAME = "NAME"
"""Stands in a dotted key for a name that the user chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One field of one dataclass."""

    name: str
    """Its name in its block."""
    annotation: object
    """Its type, with EngineConfig replaced by the engine's own class."""
    block: type | None
    """The dataclass of its sub-keys, where it has any."""
    is_open: bool
    """Whether any key may stand below it: a mapping."""
    item: type | None
    """The dataclass of a mapping's values, where its keys are names of blocks."""
    has_default: bool
    """Whether it may be left out."""
    default: object
    """The default, made anew; None where there is none."""


def iterate_entries(cls: type, *, engine_class: type[EngineConfig]) -> Iterator[Entry]:
    """The fields of a dataclass in order of definition."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        annotation = engine_class if hints[field.name] is EngineConfig else hints[field.name]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        yield Entry(
            name=field.name,
            annotation=annotation,
            block=find_block_class(annotation),
            is_open=get_origin(annotation) in (dict, Mapping),
            item=find_item_class(annotation),
            has_default=default is not MISSING,
            default=None if default is MISSING else default,
        )


def find_block_class(annotation: object) -> type | None:
    """The dataclass that an annotation names, alone or beside None."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        blocks = [
            block
            for argument in get_args(annotation)
            if (block := find_block_class(argument)) is not None
        ]
        return blocks[0] if blocks else None
    return None


def find_item_class(annotation: object) -> type | None:
    """The dataclass that a mapping from names to blocks holds."""
    return (
        find_block_class(get_args(annotation)[1])
        if get_origin(annotation) in (dict, Mapping)
        else None
    )


def is_optional(annotation: object) -> bool:
    """Whether None is among the values that an annotation allows."""
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def collect_keys(
    cls: type, *, engine_class: type[EngineConfig], prefix: str = ""
) -> dict[str, Entry]:
    """Every dotted key below a dataclass, blocks included, in order."""
    found: dict[str, Entry] = {}
    for entry in iterate_entries(cls, engine_class=engine_class):
        found[prefix + entry.name] = entry
        if entry.block is not None:
            found |= collect_keys(
                entry.block, engine_class=engine_class, prefix=f"{prefix}{entry.name}."
            )
        if entry.item is not None:
            found |= collect_keys(
                entry.item, engine_class=engine_class, prefix=f"{prefix}{entry.name}.{ANY_NAME}."
            )
    return found


def collect_defaults(
    cls: type, *, engine_class: type[EngineConfig], given: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Defaults as to_plain values; an optional block is filled in only where ``given`` sets something in it.

    Keys without a default are absent.
    """
    defaults: dict[str, Plain] = {}
    for entry in iterate_entries(cls, engine_class=engine_class):
        below = given.get(entry.name)
        if entry.item is not None and isinstance(below, dict):
            defaults[entry.name] = {
                name: collect_defaults(
                    entry.item,
                    engine_class=engine_class,
                    given=block if isinstance(block, dict) else {},
                )
                for name, block in below.items()
                if block is not None
            }
            continue
        is_off = entry.name in given and below is None
        is_unasked = is_optional(entry.annotation) and not isinstance(below, dict)
        if entry.has_default and (entry.default is not None or entry.block is None or is_unasked):
            defaults[entry.name] = None if is_off else to_plain(entry.default)
        elif entry.block is not None and not is_off:
            defaults[entry.name] = collect_defaults(
                entry.block,
                engine_class=engine_class,
                given=below if isinstance(below, dict) else {},
            )
    return defaults


def to_plain(value: object) -> Plain:
    """A setting, or a whole configuration, as to_plain values: dataclasses and mappings become dicts, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), f"{value!r} is no setting"
    return value


def flatten(tree: Mapping[str, Plain], *, prefix: str = "") -> dict[str, Plain]:
    """Dotted keys of the values in a tree; a list and an empty mapping are values."""
    found: dict[str, Plain] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, prefix=f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
