"""Choose the groups that a step of loop ``async`` trains: the first ones to be ready.

A group is a prompt with its completions. Let S be the limit of staleness, P the number of groups
per step, and v the number of updates so far. A group whose first request reached the sampler after
s updates has the deadline s + S: it must be trained by the step that follows s + S updates.

A batch takes the groups that became ready first, if all other groups can still meet their
deadlines. To check this, count the started groups that the batch leaves. For each j from 0 to
S - 1, at most j * P of them may have a deadline of v + j or earlier, because j steps train j * P
groups.

No group is dropped, and no step waits forever: at most (S + 1) * P groups are admitted and not
trained (`temper_trainer.loops.rollouts.batch_pipeline.Credits`), so a valid batch exists at the
latest when the groups with the earliest deadlines are ready.
"""

from collections import Counter
from collections.abc import Collection
from itertools import accumulate
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadyGroups(Generic[T]):
    """Groups that are being sampled, or are ready and wait for training.

    A group has the number of its prompt.

    Example:
        >>> groups = ReadyGroups[str](max_staleness=1, batch_size=1)
        >>> groups.start(0)
        >>> groups.add(1, "fast")
        >>> groups.choose()  # group 0 can still be trained by the next step
        [1]
        >>> groups.take([1])
        ['fast']
        >>> groups.train()
        >>> groups.add(2, "faster")
        >>> groups.choose() is None  # now group 0 must come first
        True
    """

    def __init__(self, *, max_staleness: int, batch_size: int) -> None:
        """Start without groups.

        Args:
            max_staleness: Maximum age of a group when it is trained, in weight updates.
            batch_size: Groups per step.
        """
        self._max_staleness = max_staleness
        self._batch_size = batch_size
        self._num_trained = 0
        self._deadlines: dict[int, int] = {}
        self._ready: dict[int, T] = {}  # in the order of their arrival
        # Count by deadline, so that a batch that must wait is noticed without a scan of all groups.
        self._num_started = Counter[int]()
        self._num_ready = Counter[int]()

    def start(self, group: int) -> None:
        """Record that a request of a group reaches the sampler; only the first one counts."""
        if group not in self._deadlines:
            self._deadlines[group] = self._num_trained + self._max_staleness
            self._num_started[self._deadlines[group]] += 1

    def add(self, group: int, value: T) -> None:
        """Add a group whose rollouts are all scored."""
        # A group whose start was not recorded counts as started now.
        self.start(group)
        self._ready[group] = value
        self._num_ready[self._deadlines[group]] += 1

    def choose(self) -> list[int] | None:
        """Return the groups of the next batch in ascending order; None if it must wait."""
        if len(self._ready) < self._batch_size:
            return None
        deadlines = range(self._num_trained, self._num_trained + self._max_staleness + 1)
        num_started = accumulate(self._num_started[each] for each in deadlines)
        num_ready = accumulate(self._num_ready[each] for each in deadlines)
        # Per deadline: the number of groups due by then, less those that fit into later batches.
        num_needed = [
            num_due - later * self._batch_size for later, num_due in enumerate(num_started)
        ]
        if any(needed > ready for needed, ready in zip(num_needed, num_ready, strict=True)):
            return None
        chosen: dict[int, None] = {}
        for deadline, needed in zip(deadlines, num_needed, strict=True):
            due = [group for group in self._ready if self._deadlines[group] <= deadline]
            num_missing = needed - sum(self._deadlines[group] <= deadline for group in chosen)
            more = [group for group in due if group not in chosen]
            chosen |= dict.fromkeys(more[: max(0, num_missing)])
        others = [group for group in self._ready if group not in chosen]
        chosen |= dict.fromkeys(others[: self._batch_size - len(chosen)])
        return sorted(chosen)

    def has(self, groups: Collection[int]) -> bool:
        """Return True if all of these groups are ready."""
        return all(group in self._ready for group in groups)

    def take(self, groups: Collection[int]) -> list[T]:
        """Remove groups for a batch, and return their values."""
        for group in groups:
            deadline = self._deadlines.pop(group)
            self._num_started[deadline] -= 1
            self._num_ready[deadline] -= 1
        return [self._ready.pop(group) for group in groups]

    def train(self) -> None:
        """Record that the weights were updated by the batch that was taken."""
        self._num_trained += 1
