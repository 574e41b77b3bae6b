"""The classes whose instances ranks may gather. Does not import torch; see `gather_codec`."""

from typing import TypeVar

TypeT = TypeVar("TypeT", bound=type)

CLASSES: dict[str, type] = {}
"""Classes marked as `gatherable`, by full name."""


def gatherable(cls: TypeT) -> TypeT:
    """Allow instances of a dataclass or an enum in gathered values; for use as a decorator.

    The class must be safe to construct with any field values: a message names the class and the
    values.
    """
    CLASSES[full_name(cls)] = cls
    return cls


def full_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
