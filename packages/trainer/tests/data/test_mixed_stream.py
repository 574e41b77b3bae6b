"""Several sources in one stream: fractions, repetition, resuming."""

import pytest

from temper_trainer.data.rows import DataError
from temper_trainer.data.streams import MixedStream
from temper_trainer.types import DataCursor

SOURCES = {"math": list(range(10)), "code": [100, 101, 102]}
WEIGHTS = {"math": 1.0, "code": 3.0}


def open_stream(cursor: DataCursor | None = None) -> MixedStream[int]:
    return MixedStream(SOURCES, weights=WEIGHTS, seed=3, shuffle=True, cursor=cursor)


def test_every_stretch_has_the_fractions_of_the_weights() -> None:
    items = open_stream().take(400)
    for start in range(392):
        num_math = sum(item < 100 for item in items[start : start + 8])
        assert abs(num_math - 2) <= 1  # a quarter of 8
    assert sum(item < 100 for item in items) == 100


def test_each_source_is_repeated_in_a_new_order() -> None:
    code = [item for item in open_stream().take(80) if item >= 100]
    passes = [code[i : i + 3] for i in range(0, 60, 3)]
    assert all(sorted(each) == [100, 101, 102] for each in passes)
    assert len(set(map(tuple, passes))) > 1


@pytest.mark.parametrize("num_before", [0, 1, 12, 13, 14, 200])
def test_stream_continues_from_its_cursor(num_before: int) -> None:
    stream = open_stream()
    stream.take(num_before)
    cursor = stream.cursor
    assert cursor.epoch * 13 + cursor.index == num_before
    assert open_stream(cursor).take(50) == stream.take(50)


def test_empty_source_is_an_error() -> None:
    with pytest.raises(DataError, match="code has no training items"):
        MixedStream({"math": [1], "code": []}, weights=WEIGHTS, seed=0, shuffle=True)
