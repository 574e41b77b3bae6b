"""Streams of training items that resume from a cursor."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from temper_trainer.data.rows import DataError
from temper_trainer.types import DataCursor

Item = TypeVar("Item")


def epoch_order(num_items: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """[num_items] indices in the order of one pass."""
    order = list(range(num_items))
    if shuffle:
        # Python promises that a string seed and shuffle give the same order in every later version.
        random.Random(f"order {seed} {epoch}").shuffle(order)
    return order


class InMemoryStream(Generic[Item]):
    """Items handed out for ever: every pass gives each once, and a take may cross from one pass into the next."""

    def __init__(
        self, items: Sequence[Item], *, seed: int, shuffle: bool, cursor: DataCursor | None = None
    ) -> None:
        """A stream that goes on at the cursor; None begins.

        Raises:
            DataError: there are no items, or the cursor lies behind their end: the data are not those that it was saved with.
        """
        at = DataCursor() if cursor is None else cursor
        if not items:
            raise DataError(
                "there is nothing to hand out: the data set is empty, or every prompt in it was dropped."
            )
        if not 0 <= at.index <= len(items) or at.epoch < 0:
            raise DataError(
                f"the data cursor stands at {at.index} of epoch {at.epoch}, but there are {len(items)} items: "
                "resume with the data that the checkpoint was made with."
            )
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._order: list[int] = []
        self._order_epoch = -1
        self._seek(at)

    @property
    def cursor(self) -> DataCursor:
        """Where the next take begins. At the end of a pass it stands at index 0 of the next."""
        return self._cursor

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items."""
        taken: list[Item] = []
        while len(taken) < count:
            start = self._cursor.index
            chosen = self._order[start : start + count - len(taken)]
            taken += [self._items[i] for i in chosen]
            self._seek(DataCursor(epoch=self._cursor.epoch, index=start + len(chosen)))
        return taken

    def take_within(self, limit: int, *, size_of: Callable[[Item], int]) -> list[Item]:
        """The next items in order until one more would exceed a limit; at least one, whatever its size."""
        taken: list[Item] = []
        total = 0
        while True:
            before = self._cursor
            (item,) = self.take(1)
            total += size_of(item)
            if taken and total > limit:
                self._seek(before)
                return taken
            taken.append(item)

    def _seek(self, cursor: DataCursor) -> None:
        if cursor.index == len(self._items):
            cursor = DataCursor(epoch=cursor.epoch + 1)
        if self._order_epoch != cursor.epoch:
            self._order = epoch_order(
                len(self._items), seed=self._seed, epoch=cursor.epoch, shuffle=self._shuffle
            )
            self._order_epoch = cursor.epoch
        self._cursor = cursor


class BufferedStream(Generic[Item]):
    """Items of a source that is opened anew for each pass; see ``InMemoryStream``, which holds all of them."""

    def __init__(
        self,
        open_pass: Callable[[], Iterator[Item]],
        *,
        seed: int,
        buffer: int,
        shuffle: bool,
        cursor: DataCursor | None = None,
    ) -> None:
        """A stream that goes on at the cursor, by reading and passing over what came before it in its pass.

        Args:
            open_pass: every item once, in the source's order.
            seed: with the number of the pass it determines the order.
            buffer: items among which the next is drawn.
            shuffle: False keeps the source's order.
            cursor: None begins.

        Raises:
            DataError: the source holds no item, or fewer than the cursor says.
        """
        self._open_pass = open_pass
        self._seed, self._buffer, self._shuffle = seed, buffer, shuffle
        self._cursor = DataCursor() if cursor is None else cursor
        self._items = self._ordered(self._cursor.epoch)
        self._waiting: list[Item] = []
        for i in range(self._cursor.index):
            if next(self._items, None) is None:
                raise DataError(
                    f"the data cursor stands at {self._cursor.index}, but the source has only {i} items: resume with its data."
                )

    @property
    def cursor(self) -> DataCursor:
        """Where the next take begins."""
        return self._cursor

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items."""
        return [self._next() for _ in range(count)]

    def take_within(self, limit: int, *, size_of: Callable[[Item], int]) -> list[Item]:
        """The next items in order until one more would exceed a limit; at least one, whatever its size."""
        taken: list[Item] = []
        total = 0
        while True:
            before = self._cursor
            item = self._next()
            total += size_of(item)
            if taken and total > limit:
                self._waiting, self._cursor = [item], before
                return taken
            taken.append(item)

    def _next(self) -> Item:
        if self._waiting:
            item = self._waiting.pop()
        else:
            found = next(self._items, None)
            if found is None:
                if self._cursor.index == 0:
                    raise DataError(
                        "there is nothing to hand out: the source holds no item, or every one was dropped."
                    )
                self._cursor = DataCursor(epoch=self._cursor.epoch + 1)
                self._items = self._ordered(self._cursor.epoch)
                return self._next()
            item = found
        self._cursor = DataCursor(epoch=self._cursor.epoch, index=self._cursor.index + 1)
        return item

    def _ordered(self, epoch: int) -> Iterator[Item]:
        if not self._shuffle:
            yield from self._open_pass()
            return
        draw, held = random.Random(f"stream {self._seed} {epoch}"), list[Item]()
        for item in self._open_pass():
            if len(held) < self._buffer:
                held.append(item)
                continue
            place = draw.randrange(len(held))
            yield held[place]
            held[place] = item
        draw.shuffle(held)
        yield from held
