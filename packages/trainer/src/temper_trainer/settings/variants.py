"""Tagged unions: one dataclass per alternative, selected by name, with only its own settings.

    class PolicyLoss(Variant): ...      # the union

    @variant("gspo")                    # an alternative of it
    class Gspo(PolicyLoss):
        clip_low: NonNegativeFloat = 3e-4

A field of the type ``PolicyLoss`` is then read from ``{name: gspo, clip_low: 1e-4}`` or ``gspo``. A
field of the type ``PolicyLoss | Custom`` is also read from an import path.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

from temper_engine_api.errors import ConfigError
from temper_trainer.settings.names import import_object, suggest_name
from temper_trainer.settings.ranges import check_ranges

ClassT = TypeVar("ClassT", bound=type)
VariantT = TypeVar("VariantT", bound="Variant")
Scalar = str | int | float | bool | None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(cls: ClassT) -> ClassT:
    """Make a class a frozen dataclass with keyword arguments that checks its fields' ranges."""
    own_post_init = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        # A derived class can inherit this method: check_ranges uses the fields of type(self).
        check_ranges(self)
        if own_post_init is not None:
            own_post_init(self)

    if own_post_init is not None or not hasattr(cls, "__post_init__"):
        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    # Resolved here, because cattrs drops ranges from annotations that are strings.
    hints = typing.get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: hints[name] for name in inspect.get_annotations(cls)}
    # With slots=True the dataclass is a new class, so its methods cannot use super().
    made: Any = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    return cast("ClassT", made)


class Variant:
    """Base class of unions. A direct subclass is a union, and registers its alternatives."""

    __slots__ = ()
    name: ClassVar[str]
    """Name of an alternative in the configuration, from its decorator, or else its import path."""
    default_name: ClassVar[str | None] = None
    """Name of the alternative for a block without the key `name`; None if the key is required."""
    _registry: ClassVar[dict[str, type["Variant"]]]

    def __init_subclass__(cls) -> None:
        if Variant in cls.__bases__:
            cls._registry = {}
        else:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def variant(name: str) -> Callable[[type[VariantT]], type[VariantT]]:
    """Make a class an alternative of the union it derives from, as a decorator.

    The class becomes a frozen dataclass with keyword arguments that checks its fields' ranges.

    Raises:
        ConfigError: If another class of the union has that name.
    """

    def add(cls: type[VariantT]) -> type[VariantT]:
        cls = settings(cls)
        known = cls._registry.setdefault(name, cls)
        if known is not cls:
            raise ConfigError(
                f"{cls.__qualname__} has the name {name!r}, which "
                f"{known.__module__}.{known.__qualname__} already has: choose another."
            )
        cls.name = name
        return cls

    return add


def list_variants(union: type[VariantT]) -> Mapping[str, type[VariantT]]:
    """Return a union's alternatives by name, in definition order."""
    return types.MappingProxyType(union._registry)  # type: ignore[arg-type]


@settings
class Custom:
    """A class that is defined outside this package, given by its import path."""

    name: str
    """Import path ``package.module:Name``."""
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    """Keyword arguments."""

    def build(self, union: type[VariantT], *, key: str) -> VariantT:
        """Import the class and construct it with the arguments.

        Args:
            union: Class that it must derive from.
            key: Configuration key, for messages.

        Raises:
            ConfigError: If it cannot be imported, does not derive from ``union``, lacks a field, or
                refuses a value.
        """
        loaded: Any = import_object(self.name, key=key)
        if not (isinstance(loaded, type) and issubclass(loaded, union)):
            raise ConfigError(
                f"{key} is {self.name}, which does not derive from "
                f"{union.__module__}.{union.__qualname__}: make it a subclass."
            )
        known = {each.name for each in fields(cast("Any", loaded))}
        if unknown := sorted(self.arguments.keys() - known):
            raise ConfigError(
                f"{key}.arguments names {', '.join(unknown)}, but the arguments of {self.name} are "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        try:
            return loaded(**self.arguments)
        except ConfigError as error:
            raise ConfigError(f"{key}.arguments: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Alternatives that a field of a union's type accepts."""

    union: type[Variant]
    is_open: bool
    """True if import paths of custom alternatives are accepted."""
    is_optional: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the alternatives."""
        return tuple(list_variants(self.union))

    def find_class(self, name: object) -> type | None:
        """Return the dataclass of an alternative, or None if there is no such name."""
        if self.is_open and isinstance(name, str) and ":" in name:
            return Custom
        return list_variants(self.union).get(name) if isinstance(name, str) else None

    def describe_unknown(self, name: object) -> str:
        """Return why a name is refused, to be put after a key."""
        custom = ", or the import path package.module:Name of your own" if self.is_open else ""
        options = f"{', '.join(self.names)}{custom}"
        if name is None:
            return f"has no name: add one of {options}, such as {{name: {self.names[0]}}}."
        return f"is {name!r}, but must be one of {options}.{suggest_name(name, self.names)}"


def find_choice(annotation: object) -> Choice | None:
    """Return what a type accepts if it is a union of variants, optional or not; else None."""
    members = (
        get_args(annotation)
        if get_origin(annotation) in (Union, types.UnionType)
        else (annotation,)
    )
    unions = [
        each
        for each in members
        if isinstance(each, type) and Variant in getattr(each, "__bases__", ())
    ]
    if not unions:
        return None
    return Choice(union=unions[0], is_open=Custom in members, is_optional=type(None) in members)
