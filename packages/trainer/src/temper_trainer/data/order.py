"""The order in which items are handed out: a pure function of (seed, epoch), so that a cursor of two numbers is all there is to resume."""

import random
from collections.abc import Callable, Sequence
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


class PromptStream(Generic[Item]):
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
