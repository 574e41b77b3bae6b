"""Registry of the classes whose instances ranks may gather with `gather_codec`.

Does not import torch, so that modules without torch can mark their classes.
"""

from typing import TypeVar

TypeT = TypeVar("TypeT", bound=type)

CLASSES: dict[str, type] = {}
"""Classes marked as `gatherable`, by full name."""


def gatherable(cls: TypeT) -> TypeT:
    """Allow instances of a dataclass or an enum in gathered values; use it as a decorator.

    A rank that receives a message constructs the class with the field values in the message, so
    constructing it with any values must be safe.
    """
    CLASSES[format_full_name(cls)] = cls
    return cls


def format_full_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
