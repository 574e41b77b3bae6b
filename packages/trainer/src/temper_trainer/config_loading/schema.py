"""The configuration's dataclasses as a tree of dotted keys, and conversions to plain values."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Union, get_args, get_origin

from temper_engine_api.specs import EngineConfig

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""Values that YAML and JSON can represent."""

ANY_NAME = "NAME"
"""Placeholder in a dotted key for a name that the user chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One field of a configuration dataclass."""

    name: str
    annotation: object
    """Type, with EngineConfig replaced by the engine's own class."""
    block: type | None
    """Dataclass of its sub-keys, if it has any."""
    is_open: bool
    """True for a mapping with arbitrary keys."""
    item: type | None
    """Dataclass of a mapping's values, if its keys are user-chosen names of blocks."""
    has_default: bool
    """True if it may be left out."""
    default: object
    """A fresh copy of the default; None if there is none."""


def iterate_entries(cls: type, *, engine_class: type[EngineConfig]) -> Iterator[Entry]:
    """Yield the fields of a dataclass in order of definition."""
    # Resolved, because an annotation may be a string.
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        annotation = engine_class if hints[field.name] is EngineConfig else hints[field.name]
        # A new object each time: a caller may change the lists and mappings in it.
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
    """Return the dataclass in an annotation, also if None is allowed; else None."""
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
    """Return the dataclass of the values of a mapping from names to blocks, else None."""
    return (
        find_block_class(get_args(annotation)[1])
        if get_origin(annotation) in (dict, Mapping)
        else None
    )


def is_optional(annotation: object) -> bool:
    """Return True if an annotation allows None."""
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def collect_keys(
    cls: type, *, engine_class: type[EngineConfig], prefix: str = ""
) -> dict[str, Entry]:
    """Return every dotted key below a dataclass, blocks included, in order."""
    collected: dict[str, Entry] = {}
    for entry in iterate_entries(cls, engine_class=engine_class):
        collected[prefix + entry.name] = entry
        if entry.block is not None:
            collected |= collect_keys(
                entry.block, engine_class=engine_class, prefix=f"{prefix}{entry.name}."
            )
        if entry.item is not None:
            collected |= collect_keys(
                entry.item, engine_class=engine_class, prefix=f"{prefix}{entry.name}.{ANY_NAME}."
            )
    return collected


def collect_defaults(
    cls: type, *, engine_class: type[EngineConfig], given: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Return defaults as plain values; keys without a default are absent.

    An optional block is filled only if ``given`` sets a key in it.
    """
    defaults: dict[str, Plain] = {}
    for entry in iterate_entries(cls, engine_class=engine_class):
        given_block = given.get(entry.name)
        if entry.item is not None and isinstance(given_block, dict):
            defaults[entry.name] = {
                name: collect_defaults(
                    entry.item,
                    engine_class=engine_class,
                    given=block if isinstance(block, dict) else {},
                )
                for name, block in given_block.items()
                if block is not None
            }
            continue
        # An explicit null switches a block off; a block that is not mentioned keeps its default.
        is_off = entry.name in given and given_block is None
        is_unset = is_optional(entry.annotation) and not isinstance(given_block, dict)
        if entry.has_default and (entry.default is not None or entry.block is None or is_unset):
            defaults[entry.name] = None if is_off else to_plain(entry.default)
        elif entry.block is not None and not is_off:
            defaults[entry.name] = collect_defaults(
                entry.block,
                engine_class=engine_class,
                given=given_block if isinstance(given_block, dict) else {},
            )
    return defaults


def to_plain(value: object) -> Plain:
    """Convert settings to plain values: dataclasses and mappings to dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), (
        f"{value!r} is not a setting"
    )
    return value


def flatten(tree: Mapping[str, Plain], *, prefix: str = "") -> dict[str, Plain]:
    """Return the values of a tree by dotted key; lists and empty mappings are values."""
    collected: dict[str, Plain] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            collected |= flatten(value, prefix=f"{prefix}{key}.")
        else:
            collected[f"{prefix}{key}"] = value
    return collected
