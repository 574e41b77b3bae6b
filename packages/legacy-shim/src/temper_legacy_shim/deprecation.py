"""Deprecated classes: the sentence on the class, the record that it states, and the warning.

The sentence is written once, as the literal argument of ``typing_extensions.deprecated``, because
type checkers and editors read only literals. A warning is shown once for each place that constructs
the class, and names the caller's line.
"""

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

ClassT = TypeVar("ClassT", bound=type)

PACKAGE = "temper-legacy-shim"
"""Package whose releases ``since`` and ``removed_in`` count."""


_SENTENCE = re.compile(
    rf"(?P<what>\S+) is deprecated since {PACKAGE} (?P<since>[\d.]+) and will be removed in "
    r"(?P<removed_in>[\d.]+): "
    r"use (?P<module>[\w.]+)\.(?P<name>\w+) instead; (?P<how>.+)\."
)


class LegacyWorkerWarning(FutureWarning):
    """A deprecated worker is in use; shown by default, whichever module calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    what: str
    """Import path, as users write it."""
    since: str
    """Release of this package that deprecated it."""
    removed_in: str
    """Release that no longer has it, at least two minor releases later."""
    instead: str
    """Import path of the replacement, ``module:name``."""
    how: str
    """Instruction for the replacement, without a final dot."""

    @classmethod
    def from_sentence(cls, sentence: str) -> "Deprecation":
        """Parse the sentence that ``sentence`` writes.

        Raises:
            ValueError: The sentence has another form.
        """
        match = _SENTENCE.fullmatch(sentence)
        if match is None:
            raise ValueError(
                f"{sentence!r} is not a sentence of a deprecation: write one as "
                "Deprecation.format_warning() does."
            )
        parts = match.groupdict()
        return cls(instead=f"{parts.pop('module')}:{parts.pop('name')}", **parts)

    def format_warning(self) -> str:
        module, _, name = self.instead.partition(":")
        return (
            f"{self.what} is deprecated since {PACKAGE} {self.since} and will be removed in "
            f"{self.removed_in}: use {module}.{name} instead; {self.how}."
        )

    def is_overdue(self, version: str) -> bool:
        """Check if the class should be gone in this version."""
        return _numbers(version) >= _numbers(self.removed_in)

    def replacement(self) -> object:
        """Import the replacement.

        Raises:
            ImportError: its module can't be imported.
            AttributeError: the module has no such name.
        """
        module, _, name = self.instead.partition(":")
        return getattr(importlib.import_module(module), name)


RECORDS: dict[str, Deprecation] = {}
"""All deprecations of this package, by import path of the class."""


def deprecated_class(cls: ClassT) -> ClassT:
    """Register the deprecation of a class, and warn at its construction.

    The class must have ``typing_extensions.deprecated`` below this, with the sentence as a literal
    and ``category=None``, so that it does not warn a second time. Subclasses warn too, once for
    each place that constructs them.
    """
    record = Deprecation.from_sentence(vars(cls)["__deprecated__"])
    RECORDS[record.what] = record
    construct = cast("Callable[..., None]", cls.__init__)  # type: ignore[misc]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self).__init__ is cls.__init__ or not _is_warned_by_subclass(type(self), cls):  # type: ignore[misc]
            warn_caller(record)
        construct(self, *args, **kwargs)

    inherited = cls.__init_subclass__

    def __init_subclass__(subclass: type[Any], /, **kwargs: Any) -> None:
        getattr(inherited, "__func__", lambda _, **__: None)(subclass, **kwargs)
        # ray.remote() derives a class of its own. The actor's process has no line of the user's, so
        # the warning comes here.
        if "__ray_actor_class__" in vars(subclass):
            warn_caller(
                next(
                    vars(base)["__deprecation__"]
                    for base in subclass.__mro__
                    if "__deprecation__" in vars(base)
                )
            )

    cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    __init__.__wrapped__ = construct  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    cls.__deprecation__ = record  # type: ignore[attr-defined]
    return cls


def _is_warned_by_subclass(actual: type, cls: type) -> bool:
    """Check if a class between the two has a record, so that it warns instead."""
    return any(
        "__deprecation__" in vars(base) for base in actual.__mro__[: actual.__mro__.index(cls)]
    )


_RAY_PROCESS = "ray/_private/workers/default_worker.py"
"""The program of an actor's process, which calls itself ``__main__``."""
_SEEN: set[tuple[str, str, int]] = set()


def warn_caller(record: Deprecation) -> None:
    """Warn at the user's line; once for each file and line, whatever the warning filters say.

    In the process of a Ray actor that Ray itself constructs there is no such line, and no warning:
    it came where the class was given to ``ray.remote``.
    """
    result = _caller()
    if result is None:
        return
    frame, level = result
    position = (record.what, frame.f_code.co_filename, frame.f_lineno)
    if position in _SEEN:
        return
    _SEEN.add(position)
    warnings.warn(record.format_warning(), LegacyWorkerWarning, stacklevel=level)


def _caller() -> tuple[FrameType, int] | None:
    """Find the nearest frame outside this package and Ray, and its stack level.

    Returns:
        None in Ray's own processes if nothing else is on the stack; elsewhere the outermost frame
        then.
    """
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    level, outermost, is_in_ray = 1, frame, False
    while frame is not None:
        outermost = frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_of_ray = package == "ray" or frame.f_code.co_filename.endswith(_RAY_PROCESS)
        is_in_ray = is_in_ray or is_of_ray
        if package != __name__.partition(".")[0] and not is_of_ray:
            return frame, level
        frame, level = frame.f_back, level + 1
    return None if is_in_ray else (outermost, level - 1)


def _numbers(version: str) -> tuple[int, ...]:
    """Parse ``0.3`` and ``0.3.0rc1`` to (0, 3, 0): promises compare minor releases."""
    parts = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        parts.append(int(digits or 0))
    return (*parts, *[0] * (3 - len(parts)))
