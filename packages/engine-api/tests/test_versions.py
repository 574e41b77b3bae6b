"""Versions are compared by their numbers, and bounds mean what pip means by them."""

import pytest

from temper_engine_api.versions import fits, numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.3", (0, 3, 0)), ("0.3.0rc1", (0, 3, 0)), ("2.13.0+cpu", (2, 13, 0)), ("1", (1, 0, 0))],
)
def test_a_version_is_its_three_numbers(text: str, expected: tuple[int, int, int]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (">=0.1,<0.2", ["0.1.0", "0.1.9"], ["0.0.9", "0.2.0"]),
        ("<0.2,>=0.1", ["0.1.0"], ["0.2.0"]),
        ("~=0.1.2", ["0.1.2", "0.1.9"], ["0.1.1", "0.2.0"]),
        ("~=0.1", ["0.1.0", "0.9.0"], ["0.0.9", "1.0.0"]),
        ("==0.1.*", ["0.1.0", "0.1.7"], ["0.2.0"]),
        ("==0.1", ["0.1.0"], ["0.1.1"]),
        ("!=0.1.1,>0.1", ["0.1.2"], ["0.1.0", "0.1.1"]),
        ("<=0.2.0", ["0.2.0"], ["0.2.1"]),
        ("!=0.1.*", ["0.2.0"], ["0.1.5"]),
        ("", ["9.9.9"], []),
    ],
)
def test_a_bound_lets_in_what_pip_lets_in(
    bounds: str, inside: list[str], outside: list[str]
) -> None:
    assert [fits(version, bounds) for version in [*inside, *outside]] == [True] * len(inside) + [
        False
    ] * len(outside)


def test_what_can_not_be_read_is_named() -> None:
    with pytest.raises(ValueError, match="'newest' is no version"):
        numbers("newest")
    with pytest.raises(ValueError, match=r"'=>0\.1' is no bound"):
        fits("0.1.0", "=>0.1")
