"""Streams: every item once a pass, an order that a cursor restores."""

from collections.abc import Iterator

import pytest

from temper_trainer.data.rows import DataError
from temper_trainer.data.streams import BufferedStream
from temper_trainer.types import DataCursor


def stream(
    *, shuffle: bool = True, cursor: DataCursor | None = None, num_items: int = 10
) -> BufferedStream[int]:
    def one_pass() -> Iterator[int]:
        yield from range(num_items)

    return BufferedStream(one_pass, seed=3, buffer=4, shuffle=shuffle, cursor=cursor)


def test_each_pass_contains_every_item_once_in_another_order() -> None:
    items = stream()
    first, second = items.take(10), items.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream(shuffle=False).take(12) == [*range(10), 0, 1]


@pytest.mark.parametrize("taken", [0, 3, 10, 14])
def test_stream_continues_at_its_cursor(taken: int) -> None:
    uninterrupted, parts = stream(), stream()
    before = parts.take(taken)
    assert before + stream(cursor=parts.cursor).take(9) == uninterrupted.take(taken + 9)


def test_taking_by_size_stops_before_the_limit_and_skips_nothing() -> None:
    items = stream(shuffle=False)
    assert items.take_within(3, size_of=lambda item: item) == [0, 1, 2]
    assert items.cursor == DataCursor(epoch=0, index=3)
    assert items.take_within(3, size_of=lambda item: item) == [3]
    assert items.take(2) == [4, 5]


def test_empty_source_and_a_cursor_beyond_the_end_are_refused() -> None:
    with pytest.raises(DataError, match="there are no training items"):
        stream(num_items=0).take(1)
    with pytest.raises(DataError, match="has only 10 items"):
        stream(cursor=DataCursor(index=11))
