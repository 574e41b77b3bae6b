"""Test that deprecated names warn at the caller's line, work, and stay for two minor versions."""

import inspect
import warnings
from dataclasses import replace

import pytest

from temper_engine_api.deprecation import (
    Deprecation,
    TemperDeprecationWarning,
    deprecated,
    warn_caller,
)

RECORD = Deprecation(
    package="temper-example",
    what="temper_example.old_sum",
    since="0.2.1",
    removed_in="0.4.0",
    instead="temper_example.total",
    migration_hint="it takes the same arguments",
)
SENTENCE = (
    "temper_example.old_sum is deprecated since temper-example 0.2.1 and will be removed in 0.4.0: "
    "use temper_example.total instead; it takes the same arguments."
)


@deprecated(RECORD)
def old_sum(first: int, *, second: int = 1) -> int:
    """Add two numbers."""
    return first + second


@deprecated(RECORD)
class OldPair:
    """Two numbers."""

    def __init__(self, first: int) -> None:
        self.first = first


class Derived(OldPair):
    """Subclass in a user's code."""


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_call_warns_at_its_own_line_and_still_works() -> None:
    with pytest.warns(TemperDeprecationWarning) as caught:
        total, line = old_sum(2, second=3), _line()
    assert total == 5
    assert [(str(warning.message), warning.filename, warning.lineno) for warning in caught] == [
        (SENTENCE, __file__, line)
    ]


def test_constructing_warns_for_subclasses_too_and_isinstance_holds() -> None:
    with pytest.warns(TemperDeprecationWarning) as caught:
        pair, line = Derived(4), _line()
    assert (isinstance(pair, OldPair), pair.first) == (True, 4)
    assert [warning.lineno for warning in caught] == [line]


def test_the_deprecating_package_itself_is_never_named_as_the_caller() -> None:
    inside: dict[str, object] = {
        "__name__": "temper_example.components",
        "warn_caller": warn_caller,
        "RECORD": RECORD,
    }
    exec("def convenience():\n    warn_caller(RECORD)\n", inside)
    convenience = inside["convenience"]
    assert callable(convenience)
    with pytest.warns(TemperDeprecationWarning) as caught:
        convenience()
    assert caught[0].filename == __file__


def test_pythons_own_filters_show_it_where_a_script_calls_it_and_nowhere_else() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
        old_sum(1)
        exec("old_sum(1)", {"__name__": "__main__", "old_sum": old_sum})
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("removed_in", "kept"),
    [("0.3.0", False), ("0.3.9", False), ("0.4.0", True), ("1.0.0", True), ("0.1.0", False)],
)
def test_two_minor_versions_are_left(removed_in: str, kept: bool) -> None:
    if kept:
        assert replace(RECORD, removed_in=removed_in).removed_in == removed_in
    else:
        with pytest.raises(ValueError, match=r"removed_in=0\.4\.0 at the earliest"):
            replace(RECORD, removed_in=removed_in)


@pytest.mark.parametrize(
    ("release", "overdue"),
    [("0.2.1", False), ("0.3.9", False), ("0.4.0", True), ("0.4.0rc1", True), ("1.0.0", True)],
)
def test_a_record_is_overdue_from_the_release_that_promised_its_removal(
    release: str, overdue: bool
) -> None:
    assert RECORD.is_overdue(release) is overdue
