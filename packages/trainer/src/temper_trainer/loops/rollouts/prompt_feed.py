"""Training prompts with their positions, without those that were trained before a resume."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from temper_trainer.data.streams import InMemoryStream, MixedStream
from temper_trainer.types import DataCursor, Prompt


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
            stream: Starts at the first prompt that is not trained.
            num_trained: Number of prompts that the run has trained.
            trained_ahead: Which prompts of the stream are among them; 0 is its first one.
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

    def list_ahead(self, mark: FeedMark, *, trained: Iterable[int]) -> tuple[int, ...]:
        """Return which prompts after a mark need not be trained, counted from the mark.

        Args:
            mark: Place from which a resumed run would continue.
            trained: Positions of prompts that this run has trained.
        """
        positions = self._skipped | set(trained)
        return tuple(sorted(each - mark.position for each in positions if each >= mark.position))
