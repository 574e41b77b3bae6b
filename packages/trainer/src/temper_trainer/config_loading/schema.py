"""The configuration's dataclasses as a tree of dotted keys, and conversions to plain values."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Literal, Union, get_args, get_origin

from temper_engine_api.specs import EngineConfig
from temper_trainer.settings.variants import Choice, Custom, Variant, find_choice, list_variants

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
    item: "Entry | None" = None
    """Type of a mapping's values, when its keys are user-chosen block names."""
    choice: Choice | None = None
    """Variants that it chooses from, if it is a tagged union."""
    owner: type
    """Dataclass with the field, whose docstring describes it."""
    field: str
    """Name of the field there; NAME of a mapping's values is the mapping."""
    has_default: bool
    """True if it may be left out."""
    default: object
    """A fresh copy of the default; None if there is none."""

    @property
    def default_variant(self) -> str | None:
        """Name of the variant that a block without a name is; None if it must have one."""
        if isinstance(self.default, Variant):
            return self.default.name
        return None if self.choice is None else self.choice.union.default_name


def iterate_entries(
    cls: type, *, engine_class: type[EngineConfig], instance: object = None
) -> Iterator[Entry]:
    """Yield a dataclass's fields in definition order.

    Args:
        cls: The dataclass.
        engine_class: Class of the fields with the type EngineConfig.
        instance: Object of the class whose values are the defaults; None uses the class's own.
    """
    hints = _resolve_hints(cls)
    for field in dataclasses.fields(cls):
        annotation = engine_class if hints[field.name] is EngineConfig else hints[field.name]
        # A new object each time: a caller may change the lists and mappings in it.
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = default if instance is None else getattr(instance, field.name)
        yield _make_entry(field.name, annotation, owner=cls, field=field.name, default=default)


def _make_entry(
    name: str, annotation: object, *, owner: type, field: str, default: object
) -> Entry:
    choice = find_choice(annotation)
    item = find_item_class(annotation)
    return Entry(
        name=name,
        annotation=annotation,
        block=find_block_class(annotation) if choice is None else None,
        is_open=get_origin(annotation) in (dict, Mapping),
        item=None
        if item is None
        else _make_entry(ANY_NAME, item, owner=owner, field=field, default=MISSING),
        choice=choice,
        owner=owner,
        field=field,
        has_default=default is not MISSING,
        default=None if default is MISSING else default,
    )


# A load asks for each dataclass about ten times, and resolving is slow.
@functools.cache
def _resolve_hints(cls: type) -> Mapping[str, object]:
    """Return the types of all fields, also where an annotation is a string."""
    return typing.get_type_hints(cls, include_extras=True)


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
    """Return the value dataclass of a mapping from names to blocks, else None."""
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
    """Return all dotted keys below a dataclass in order, including nested dataclasses."""
    # mypy does not know that a `type[EngineConfig]` is hashable.
    hashable: type = engine_class
    return dict(_collect_keys(cls, hashable, prefix))


# A load asks twice for all keys, which takes a twelfth of its time.
@functools.cache
def _collect_keys(cls: type, engine_class: type, prefix: str) -> Mapping[str, Entry]:
    collected: dict[str, Entry] = {}
    for entry in iterate_entries(cls, engine_class=engine_class):
        collected |= _collect_entry(entry, engine_class=engine_class, prefix=prefix)
    return collected


def _collect_entry(
    entry: Entry, *, engine_class: type[EngineConfig], prefix: str
) -> dict[str, Entry]:
    """Return a field and the keys below it."""
    collected = {prefix + entry.name: entry}
    block = f"{prefix}{entry.name}."
    if entry.block is not None:
        collected |= collect_keys(entry.block, engine_class=engine_class, prefix=block)
    if entry.item is not None:
        collected |= _collect_entry(entry.item, engine_class=engine_class, prefix=block)
    if entry.choice is not None:
        collected[f"{block}name"] = _make_name_entry(entry, entry.choice)
        for variant in list_classes(entry.choice).values():
            inner = collect_keys(variant, engine_class=engine_class, prefix=block)
            collected |= {key: each for key, each in inner.items() if key not in collected}
    return collected


def list_classes(choice: Choice) -> dict[str, type]:
    """Return the dataclasses of all variants by name; that of import paths is the last."""
    custom = {"package.module:Name": Custom} if choice.is_open else {}
    return {**list_variants(choice.union), **custom}


def split_settings(
    choice: Choice, *, name: str, engine_class: type[EngineConfig]
) -> tuple[list[Entry], dict[str, list[str]]]:
    """Return a variant's settings: own ones, and names by the earlier variant that has them.

    A setting is shared if it is the same field of a common base class.
    """
    classes = list_classes(choice)
    earlier = list(classes)[: list(classes).index(name)]
    own: list[Entry] = []
    shared: dict[str, list[str]] = {}
    for entry in iterate_entries(classes[name], engine_class=engine_class):
        definer = _find_definer(classes[name], entry.name)
        owner = next((e for e in earlier if _find_definer(classes[e], entry.name) is definer), None)
        if owner is None:
            own.append(entry)
        else:
            shared.setdefault(owner, []).append(entry.name)
    return own, shared


def _find_definer(cls: type, field: str) -> type | None:
    """Return the nearest class in the hierarchy that annotates a field, or None."""
    return next((base for base in cls.__mro__ if field in inspect.get_annotations(base)), None)


def _make_name_entry(entry: Entry, choice: Choice) -> Entry:
    """Return the key that chooses the variant."""
    return Entry(
        name="name",
        annotation=str if choice.is_open else Literal[choice.names],
        block=None,
        is_open=False,
        owner=Variant,
        field="name",
        has_default=entry.default_variant is not None,
        default=entry.default_variant,
    )


def collect_defaults(
    cls: type,
    *,
    engine_class: type[EngineConfig],
    given: Mapping[str, Plain],
    instance: object = None,
) -> dict[str, Plain]:
    """Return defaults as plain values; keys without a default are absent.

    An optional block gets its defaults only if ``given`` sets a key in it. A block with variants
    has the defaults of the variant that ``given`` names.

    Args:
        cls: The dataclass.
        engine_class: Dataclass that replaces EngineConfig, the declared type of engine fields.
        given: Values that are set.
        instance: Object of the class whose values are the defaults; None uses the class's own.
    """
    defaults: dict[str, Plain] = {}
    for entry in iterate_entries(cls, engine_class=engine_class, instance=instance):
        is_given, block = entry.name in given, given.get(entry.name)
        if is_given and block is None:
            # An explicit null switches a block off.
            defaults |= {entry.name: None} if entry.has_default else {}
        elif entry.item is not None and isinstance(block, dict):
            defaults[entry.name] = {
                name: _collect_block(entry.item, engine_class=engine_class, given=item)
                for name, item in block.items()
                if item is not None
            }
        elif _find_block_class(entry, given=block) is not None and (
            isinstance(block, dict) or not entry.has_default
        ):
            defaults[entry.name] = _collect_block(entry, engine_class=engine_class, given=block)
        elif entry.has_default:
            defaults[entry.name] = to_plain(entry.default)
    return defaults


def _collect_block(
    entry: Entry, *, engine_class: type[EngineConfig], given: Plain
) -> dict[str, Plain]:
    """Return a block's defaults; none for a variant whose name does not exist."""
    cls = _find_block_class(entry, given=given)
    if cls is None:
        return {}
    return _get_name(entry, given=given) | collect_defaults(
        cls,
        engine_class=engine_class,
        given=given if isinstance(given, dict) else {},
        instance=entry.default if type(entry.default) is cls else None,
    )


def _find_block_class(entry: Entry, *, given: Plain) -> type | None:
    """Return the dataclass of a field's keys; of a variant, that of the name in force."""
    if entry.choice is None:
        return entry.block
    return entry.choice.find_class(_get_name(entry, given=given).get("name"))


def _get_name(entry: Entry, *, given: Plain) -> dict[str, Plain]:
    """Return the key that chooses a variant, and its value; empty if nothing chooses one."""
    default = entry.default_variant
    name = given.get("name", default) if isinstance(given, dict) else default
    return {} if entry.choice is None or name is None else {"name": name}


def to_plain(value: object) -> Plain:
    """Convert settings to plain values: dataclasses and mappings to dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name: dict[str, Plain] = {"name": value.name} if isinstance(value, Variant) else {}
        return name | {
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
