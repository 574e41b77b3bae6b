"""Deprecations of our own names as records: what, since when, until when, what instead, and how.

A package keeps its records in a module ``deprecations`` as the tuple ``DEPRECATIONS``; this repository's checks refuse to release a
version that was promised to be without one of them. The sentence that a user reads is made from the record:

    OLD = Deprecation(
        package="temper-trainer",
        what="temper_trainer.data.read_rows",
        since="0.2.0",
        removed_in="0.4.0",
        instead="temper_trainer.data.read_prompts",
        how="it takes the same arguments",
    )


    @deprecated(OLD)
    def read_rows(path): ...

Parameters and values have no decorator: call ``warn_caller(OLD)`` where they are met.
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

MINORS = 2
"""For how many minor versions a deprecated name stays, at least."""

P = ParamSpec("P")
T = TypeVar("T")


class TemperDeprecationWarning(DeprecationWarning):
    """A deprecated name is in use; shown by default where ``__main__`` uses it, and by pytest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    """One deprecated name, parameter or value.

    Raises:
        ValueError: its removal is promised for fewer than two minor versions after ``since``.
    """

    package: str
    """The distribution whose releases ``since`` and ``removed_in`` count."""
    what: str
    """As users write it: a dotted name, or a name with a parameter or value."""
    since: str
    """Release that deprecated it."""
    removed_in: str
    """Release that no longer has it."""
    instead: str
    """What replaces it, as users write it."""
    how: str
    """What to write instead, as an instruction without a final dot."""

    def __post_init__(self) -> None:
        (major, minor, _), (removed_major, removed_minor, _) = (
            parse_version(self.since),
            parse_version(self.removed_in),
        )
        if removed_major < major or (removed_major == major and removed_minor < minor + MINORS):
            raise ValueError(
                f"{self.what} is deprecated since {self.since} and its removal is promised for {self.removed_in}: "
                f"leave {MINORS} minor versions, removed_in={major}.{minor + MINORS}.0 at the earliest."
            )

    def sentence(self) -> str:
        """What the user reads."""
        return (
            f"{self.what} is deprecated since {self.package} {self.since} and will be removed in {self.removed_in}: "
            f"use {self.instead} instead; {self.how}."
        )

    def is_overdue(self, version: str) -> bool:
        """Whether a release of this version should no longer have it."""
        return parse_version(version) >= parse_version(self.removed_in)


def deprecated(record: Deprecation) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function or class: it warns at the line that calls or constructs it, and type checkers and editors know.

    A class stays a class: its constructor warns, and so do those of its subclasses.
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
        # Without a category this is for type checkers and editors alone: the run-time warning above knows the caller.
        return cast(
            "Callable[P, T]", _mark_for_type_checkers(record.sentence(), category=None)(marked)
        )

    return mark


def warn_caller(record: Deprecation) -> None:
    """Warn at the nearest line outside the package that deprecated it; how often it is shown, the warning filters decide."""
    warnings.warn(
        record.sentence(),
        TemperDeprecationWarning,
        stacklevel=_distance_of_caller(record.package.replace("-", "_")),
    )


def _distance_of_caller(package: str) -> int:
    """The nearest frame that is neither of that package nor of this module, as ``warnings`` counts: 1 is ``warn_caller``."""
    frame: FrameType | None = sys._getframe(1)
    distance = 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] != package:
            return distance
        frame, distance = frame.f_back, distance + 1
    return distance
