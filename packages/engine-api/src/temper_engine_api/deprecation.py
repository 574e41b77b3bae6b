"""Records of deprecated names, and the warnings made from them.

A package keeps its records in a module `deprecations` as the tuple `DEPRECATIONS`. The checks of
this repository fail if a package's version reaches `removed_in` and the name still exists.

    OLD = Deprecation(
        package="temper-trainer",
        what="temper_trainer.data.read_rows",
        since="0.2.0",
        removed_in="0.4.0",
        instead="temper_trainer.data.read_prompts",
        migration_hint="it takes the same arguments",
    )


    @deprecated(OLD)
    def read_rows(path): ...

For a deprecated parameter or value, call `warn_caller(OLD)` where it is used.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar, cast

from typing_extensions import deprecated as _mark_for_type_checkers

from temper_engine_api.contract_version import parse_version

MIN_MINOR_VERSIONS = 2
"""Minimum number of minor versions for which a deprecated name stays."""

P = ParamSpec("P")
T = TypeVar("T")


class TemperDeprecationWarning(DeprecationWarning):
    """Warning for a deprecated name; Python shows it by default for code in `__main__`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    """One deprecated name, parameter or value.

    Raises:
        ValueError: If its removal is promised for less than two minor versions after `since`.
    """

    package: str
    """Distribution that contains the name; `since` and `removed_in` are versions of it."""
    what: str
    """Deprecated name as users write it: dotted, or with a parameter or value."""
    since: str
    """Release that deprecated it."""
    removed_in: str
    """Release that no longer has it."""
    instead: str
    """Replacement as users write it."""
    migration_hint: str
    """Last clause of the warning: how the replacement differs. No period at the end."""

    def __post_init__(self) -> None:
        (major, minor, _), (removed_major, removed_minor, _) = (
            parse_version(self.since),
            parse_version(self.removed_in),
        )
        if removed_major < major or (
            removed_major == major and removed_minor < minor + MIN_MINOR_VERSIONS
        ):
            raise ValueError(
                f"{self.what} is deprecated since {self.since} and its removal is promised for "
                f"{self.removed_in}: leave {MIN_MINOR_VERSIONS} minor versions, "
                f"removed_in={major}.{minor + MIN_MINOR_VERSIONS}.0 at the earliest."
            )

    def format_warning(self) -> str:
        """Return the text of the warning."""
        return (
            f"{self.what} is deprecated since {self.package} {self.since} and will be removed in "
            f"{self.removed_in}: "
            f"use {self.instead} instead; {self.migration_hint}."
        )

    def is_overdue(self, version: str) -> bool:
        """Return True if a release of this version must not have the name."""
        return parse_version(version) >= parse_version(self.removed_in)


def deprecated(record: Deprecation) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that deprecates a function or class.

    Calling the function, or constructing the class or a subclass, warns at the caller's line. Type
    checkers and editors mark the name too.
    """

    def mark(target: Callable[P, T]) -> Callable[P, T]:
        call: Callable[..., object] = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(call)
        def warned(*args: P.args, **kwargs: P.kwargs) -> object:
            warn_caller(record)
            return call(*args, **kwargs)

        if isinstance(target, type):
            target.__init__ = warned  # type: ignore[misc]
        marked = target if isinstance(target, type) else warned
        # category=None marks the name for type checkers only; warn_caller finds the right line.
        return cast(
            "Callable[P, T]",
            _mark_for_type_checkers(record.format_warning(), category=None)(marked),
        )

    return mark


def warn_caller(record: Deprecation) -> None:
    """Warn at the nearest line outside the package that deprecated the name."""
    warnings.warn(
        record.format_warning(),
        TemperDeprecationWarning,
        stacklevel=_distance_of_caller(record.package.replace("-", "_")),
    )


def _distance_of_caller(package: str) -> int:
    """Return the stack level, as in `warnings.warn`, of the nearest frame outside the package."""
    frame: FrameType | None = sys._getframe(1)
    distance = 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] != package:
            return distance
        frame, distance = frame.f_back, distance + 1
    return distance
