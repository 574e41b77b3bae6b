"""Number ranges as part of types.

    clip_low: NonNegativeFloat = 0.2
    mixture: Annotated[float, Range(above=0, below=1)] = 0.5

Structuring, help and reference pages read them, and ``settings`` checks them when a dataclass is
constructed in Python.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from temper_engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a finite number; without bounds, any finite number."""

    at_least: float | None = None
    """Inclusive lower bound."""
    above: float | None = None
    """Exclusive lower bound."""
    at_most: float | None = None
    """Inclusive upper bound."""
    below: float | None = None
    """Exclusive upper bound."""

    def __contains__(self, value: float) -> bool:
        # isfinite finds NaN and infinity in a range without bounds.
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        words = (f"{word} {bound:.12g}" for word, bound in bounds.items() if bound is not None)
        return " and ".join(words) or "a finite number"


FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
UnitFloat = Annotated[float, Range(at_least=0, at_most=1)]
"""A number in [0, 1]."""
PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]


def find_range(annotation: object) -> Range | None:
    """Return the range in a type, also if None is allowed; None if there is none."""
    if get_origin(annotation) is Annotated:
        return next((item for item in get_args(annotation)[1:] if isinstance(item, Range)), None)
    return next(filter(None, map(find_range, get_args(annotation))), None)


@cache  # each turn of a rollout has sampling settings of its own
def collect_ranges(cls: type[Any]) -> Mapping[str, Range]:
    """Return the ranges of a dataclass's fields by name."""
    ranges = {field.name: find_range(field.type) for field in fields(cls)}
    return {name: bounds for name, bounds in ranges.items() if bounds is not None}


def check_range(key: str, value: float | None, bounds: Range) -> None:
    """Raise if a number is outside its range, or NaN or infinite; None passes."""
    if value is not None and value not in bounds:
        raise ConfigError(f"{key} is {value}, but must be {bounds}.")


def check_order(low_key: str, low: float | None, high_key: str, high: float | None) -> None:
    """Raise unless a lower bound is below an upper one; None is no bound."""
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"{low_key} is {low} and {high_key} is {high}: the first must be smaller than the "
            "second."
        )


def check_pattern(key: str, pattern: str | None) -> None:
    """Raise if a setting is not a regular expression; None passes."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(
            f"{key} is {pattern!r}, which is not a regular expression ({error}): correct it."
        ) from None


def check_ranges(values: Any) -> None:
    """Raise if a field of a dataclass is outside its range; None passes.

    Raises:
        ConfigError: With class, field, value and range.
    """
    for name, bounds in collect_ranges(values.__class__).items():
        check_range(f"{name} of {type(values).__name__}", getattr(values, name), bounds)
