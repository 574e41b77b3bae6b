"""Streams of training items that resume from a cursor, also from easy to hard items."""

import random
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from temper_trainer.data.rows import DataError
from temper_trainer.types import DataCursor, Prompt

Item = TypeVar("Item")


def draw_epoch_order(num_items: int, *, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Return [num_items] indices, ordered for one epoch."""
    order = array("I", range(num_items))  # a list would need ten times as much memory
    if shuffle:
        # Python guarantees that shuffle with a string seed gives the same order in later versions.
        random.Random(f"order {seed} {epoch}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum(Generic[Item]):
    """Settings to sort each epoch from easy to hard items."""

    get_difficulty: Callable[[Item], float]
    """Returns an item's difficulty as a finite number."""
    shuffled_fraction: float = 0.0
    """Fraction of the items to shuffle among each other after sorting, in [0, 1]."""


def sort_by_difficulty(
    order: Sequence[int],
    difficulties: Sequence[float],
    *,
    seed: int,
    epoch: int,
    shuffled_fraction: float,
) -> list[int]:
    """Sort the indices of an epoch from easy to hard; the sort is stable.

    Then shuffle the indices at a random fraction of the positions, using (seed, epoch). A fraction
    of 1 gives a random order.

    Example:
        >>> difficulties = [3.0, 1.0, 2.0, 1.0]
        >>> sort_by_difficulty(
        ...     [2, 3, 0, 1], difficulties, seed=0, epoch=0, shuffled_fraction=0.0
        ... )
        [3, 1, 2, 0]
    """
    ordered = sorted(order, key=difficulties.__getitem__)
    drawn = list(range(len(ordered)))
    random.Random(f"curriculum {seed} {epoch}").shuffle(drawn)
    drawn = drawn[: round(shuffled_fraction * len(ordered))]
    # Shuffle by reading the indices in ascending order of position and writing them back in the
    # random order of `drawn`.
    moved = [ordered[position] for position in sorted(drawn)]
    for position, index in zip(drawn, moved, strict=True):
        ordered[position] = index
    return ordered


def get_difficulty(prompt: Prompt) -> float:
    """Return the difficulty of a prompt whose source has a `difficulty_key`."""
    assert prompt.difficulty is not None
    return prompt.difficulty


def measure_difficulty(prompts: Iterable[Prompt]) -> dict[str, float]:
    """Return the metric ``data/difficulty``: the mean over prompts that have a difficulty.

    Returns an empty dict if none has one.
    """
    difficulties = [prompt.difficulty for prompt in prompts if prompt.difficulty is not None]
    return {"data/difficulty": sum(difficulties) / len(difficulties)} if difficulties else {}


class InMemoryStream(Generic[Item]):
    """Endless stream of items that are all in memory; a batch may cross an epoch boundary.

    The order is a pure function of (seed, epoch), so a cursor with two numbers is enough to resume.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum[Item] | None = None,
        cursor: DataCursor | None = None,
    ) -> None:
        """Start a stream at a cursor; None starts at the first item.

        Args:
            items: All items.
            seed: Determines the order together with the epoch.
            shuffle: Shuffle each epoch; with a curriculum, only among equally difficult items.
            curriculum: Sort each epoch by difficulty; None does not sort.
            cursor: Position of the first item to take.

        Raises:
            DataError: If there are no items, or the data has changed so that the cursor is beyond
                the end.
        """
        start = DataCursor() if cursor is None else cursor
        if not items:
            raise DataError(
                "there are no training items: the data set is empty, or all its prompts were "
                "dropped."
            )
        # Accept the end, because a cursor may be at the end of an epoch.
        if not 0 <= start.index <= len(items) or start.epoch < 0:
            raise DataError(
                f"the data cursor is at {start.index} of epoch {start.epoch}, but there are "
                f"{len(items)} items: resume with the data that the checkpoint was made with."
            )
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._order: Sequence[int] = []
        self._order_epoch = -1
        self._seek(start)

    @property
    def cursor(self) -> DataCursor:
        """Position of the next item; at the end of an epoch it is index 0 in the next."""
        return self._cursor

    def take(self, count: int) -> list[Item]:
        """Return the next ``count`` items."""
        taken: list[Item] = []
        while len(taken) < count:
            start = self._cursor.index
            chosen = self._order[start : start + count - len(taken)]
            taken += [self._items[i] for i in chosen]
            self._seek(DataCursor(epoch=self._cursor.epoch, index=start + len(chosen)))
        return taken

    def take_within(self, limit: int, *, size_of: Callable[[Item], int]) -> list[Item]:
        """Return the next items until one more would exceed a limit; at least one item."""
        taken: list[Item] = []
        total = 0
        while True:
            cursor = self._cursor
            (item,) = self.take(1)
            total += size_of(item)
            if taken and total > limit:
                self._seek(cursor)
                return taken
            taken.append(item)

    def _seek(self, cursor: DataCursor) -> None:
        # Write the end of an epoch as the start of the next one, to have one form per position.
        if cursor.index == len(self._items):
            cursor = DataCursor(epoch=cursor.epoch + 1)
        if self._order_epoch != cursor.epoch:
            self._order = draw_epoch_order(
                len(self._items), seed=self._seed, epoch=cursor.epoch, shuffle=self._shuffle
            )
            if self._curriculum is not None:
                self._order = sort_by_difficulty(
                    self._order,
                    [self._curriculum.get_difficulty(item) for item in self._items],
                    seed=self._seed,
                    epoch=cursor.epoch,
                    shuffled_fraction=self._curriculum.shuffled_fraction,
                )
            self._order_epoch = cursor.epoch
        self._cursor = cursor


class MixedStream(Generic[Item]):
    """Endless stream that draws from several sources in fixed fractions; see ``InMemoryStream``.

    Each source has its own order and is repeated as often as needed. Any part of the stream has the
    fractions to within one item. An item's source depends only on the position in the stream, so a
    cursor with two numbers is enough to resume.

    Example:
        >>> stream = MixedStream(
        ...     {"a": [1, 2, 3], "b": [10]}, weights={"a": 2.0, "b": 1.0}, seed=0, shuffle=False
        ... )
        >>> stream.take(7)
        [1, 10, 2, 3, 10, 1, 2]
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Item]],
        *,
        weights: Mapping[str, float],
        seed: int,
        shuffle: bool,
        curricula: Mapping[str, Curriculum[Item]] | None = None,
        cursor: DataCursor | None = None,
    ) -> None:
        """Start a stream at a cursor; None starts at the first item.

        Args:
            sources: Items by source.
            weights: Weight per source, relative to the others.
            seed: Determines the order together with a source's epoch.
            shuffle: Shuffle within each source.
            curricula: Curriculum by source; a source without one is not sorted.
            cursor: Position of the first item; an epoch has as many items as all sources together.

        Raises:
            DataError: If a source has no items.
        """
        if empty := sorted(name for name, items in sources.items() if not items):
            raise DataError(
                f"{empty[0]} has no training items: its data is empty, or all its prompts were "
                "dropped."
            )
        total = sum(weights[name] for name in sources)
        self._fractions = {name: weights[name] / total for name in sources}
        self._counts = dict.fromkeys(sources, 0)
        self._epoch_size = sum(map(len, sources.values()))
        self._position = 0
        start = DataCursor() if cursor is None else cursor
        # Repeat the choices up to the cursor to find the position in each source, without reading
        # items.
        for _ in range(start.epoch * self._epoch_size + start.index):
            self._choose_source()
        self._streams = {
            name: InMemoryStream(
                items,
                seed=seed,
                shuffle=shuffle,
                curriculum=None if curricula is None else curricula.get(name),
                cursor=DataCursor(
                    epoch=self._counts[name] // len(items), index=self._counts[name] % len(items)
                ),
            )
            for name, items in sources.items()
        }

    @property
    def cursor(self) -> DataCursor:
        """Position of the next item."""
        epoch, index = divmod(self._position, self._epoch_size)
        return DataCursor(epoch=epoch, index=index)

    def take(self, count: int) -> list[Item]:
        """Return the next ``count`` items."""
        return [self._streams[self._choose_source()].take(1)[0] for _ in range(count)]

    def _choose_source(self) -> str:
        """Advance by one item, and return the source that is furthest behind its fraction."""
        self._position += 1
        name = max(
            self._fractions,
            key=lambda each: self._fractions[each] * self._position - self._counts[each],
        )
        self._counts[name] += 1
        return name


class BufferedStream(Generic[Item]):
    """Endless stream of a source that is reopened for each epoch and shuffled within a buffer.

    See ``InMemoryStream``, which has the same interface. A cursor of two numbers is enough to
    resume.
    """

    def __init__(
        self,
        open_pass: Callable[[], Iterator[Item]],
        *,
        seed: int,
        buffer: int,
        shuffle: bool,
        cursor: DataCursor | None = None,
    ) -> None:
        """Start a stream at a cursor. Reads and skips the earlier items of its epoch.

        Args:
            open_pass: Returns an iterator over every item once, in the source's order.
            seed: Determines the order together with the epoch.
            buffer: Number of items to draw the next one from.
            shuffle: Shuffle within the buffer; False keeps the source's order.
            cursor: None starts at the first item.

        Raises:
            DataError: If the source has no item, or fewer than the cursor needs.
        """
        self._open_pass = open_pass
        self._seed, self._buffer, self._shuffle = seed, buffer, shuffle
        self._cursor = DataCursor() if cursor is None else cursor
        self._items = self._ordered(self._cursor.epoch)
        self._waiting: list[Item] = []
        for i in range(self._cursor.index):
            if next(self._items, None) is None:
                raise DataError(
                    f"the data cursor is at {self._cursor.index}, but the source has only {i} "
                    "items: resume with its data."
                )

    @property
    def cursor(self) -> DataCursor:
        """Position of the next item."""
        return self._cursor

    def take(self, count: int) -> list[Item]:
        """Return the next ``count`` items."""
        return [self._next() for _ in range(count)]

    def take_within(self, limit: int, *, size_of: Callable[[Item], int]) -> list[Item]:
        """Return the next items until one more would exceed a limit; at least one item."""
        taken: list[Item] = []
        total = 0
        while True:
            cursor = self._cursor
            item = self._next()
            total += size_of(item)
            if taken and total > limit:
                # The source cannot be rewound, so the item is kept for the next call.
                self._waiting, self._cursor = [item], cursor
                return taken
            taken.append(item)

    def _next(self) -> Item:
        if self._waiting:
            item = self._waiting.pop()
        else:
            next_item = next(self._items, None)
            if next_item is None:
                if self._cursor.index == 0:
                    raise DataError(
                        "there are no training items: the source is empty, or all its items were "
                        "dropped."
                    )
                self._cursor = DataCursor(epoch=self._cursor.epoch + 1)
                self._items = self._ordered(self._cursor.epoch)
                # Recurses at most once: the new epoch has an item, or its index is still 0 and the
                # source is empty.
                return self._next()
            item = next_item
        self._cursor = DataCursor(epoch=self._cursor.epoch, index=self._cursor.index + 1)
        return item

    def _ordered(self, epoch: int) -> Iterator[Item]:
        if not self._shuffle:
            yield from self._open_pass()
            return
        # A new generator per epoch, so that resuming replays only the current epoch. The source may
        # not fit into memory, so it is shuffled within a buffer.
        draw, buffered = random.Random(f"stream {self._seed} {epoch}"), list[Item]()
        for item in self._open_pass():
            if len(buffered) < self._buffer:
                buffered.append(item)
                continue
            index = draw.randrange(len(buffered))
            yield buffered[index]
            buffered[index] = item
        draw.shuffle(buffered)
        yield from buffered


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedMark:
    """A place in the order of the prompts."""

    cursor: DataCursor
    """Position of the next prompt in the data."""
    position: int
    """Number of prompts before it since the start of the run."""


class PromptFeed:
    """The prompts of a run in their order.

    With loop ``async``, a step may train later prompts than some that are not trained yet. A
    checkpoint lists these, and a resumed run skips them.
    """

    def __init__(
        self,
        stream: InMemoryStream[Prompt] | MixedStream[Prompt],
        *,
        num_trained: int = 0,
        trained_ahead: Collection[int] = (),
    ) -> None:
        """Continue a stream.

        Args:
            stream: Stream whose next item is the first prompt that is not trained.
            num_trained: Number of prompts that the run has trained, including `trained_ahead`.
            trained_ahead: Prompts to skip, because they are trained already: the number of items
                that the stream returns before each one.
        """
        self._stream = stream
        self._position = num_trained - len(trained_ahead)
        self._skipped = {self._position + offset for offset in trained_ahead}

    @property
    def mark(self) -> FeedMark:
        """Place of the next prompt."""
        return FeedMark(cursor=self._stream.cursor, position=self._position)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Return the next prompts with their positions."""
        taken: list[tuple[int, Prompt]] = []
        while len(taken) < count:
            (prompt,) = self._stream.take(1)
            if self._position not in self._skipped:
                taken.append((self._position, prompt))
            self._position += 1
        return taken

    def list_trained_ahead(self, mark: FeedMark, *, trained: Iterable[int]) -> tuple[int, ...]:
        """Return the offsets from a mark of the later prompts that are already trained.

        Args:
            mark: Place from which a resumed run would continue.
            trained: Positions of prompts that this run has trained.
        """
        positions = self._skipped | set(trained)
        return tuple(sorted(each - mark.position for each in positions if each >= mark.position))
