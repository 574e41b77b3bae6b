"""How far sampling may run ahead: a credit for every batch, given out so that no batch can be too old when it is trained on.

Batches are numbered from 0 in the order in which they begin, and are trained on in that order. When batch n is trained on, n updates have
been made since the start. So batch n may begin as soon as n - max_staleness updates have been made: its first token is then at most
max_staleness updates old when it is used. A batch that takes long is waited for, not overtaken; nothing is ever thrown away.

Why nothing can block for ever: if batch n is awaited, n updates were made, so every batch up to n + max_staleness has its credit, n among
them; and a batch that has begun ends without asking the trainer for anything.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """The state of the account; pure, so that a test can play every order of events."""

    max_staleness: int
    """Updates that a batch may be old when it is trained on."""
    begun: int = 0
    """Batches that were begun."""
    finished: frozenset[int] = frozenset()
    """Batches that are sampled and not yet trained on."""
    trained: int = 0
    """Batches that were trained on: updates of the weights."""

    @property
    def may_begin(self) -> bool:
        """Whether there is a credit for another batch."""
        return self.begun <= self.trained + self.max_staleness

    @property
    def may_train(self) -> bool:
        """Whether the next batch in order is there."""
        return self.trained in self.finished

    def begin(self) -> "Credits":
        """One more batch is being sampled."""
        assert self.may_begin
        return self._changed(begun=self.begun + 1)

    def finish(self, batch: int) -> "Credits":
        """A batch is sampled."""
        assert self.trained <= batch < self.begun
        assert batch not in self.finished
        return self._changed(finished=self.finished | {batch})

    def train(self) -> "Credits":
        """The next batch was trained on, and its update published."""
        assert self.may_train
        return self._changed(finished=self.finished - {self.trained}, trained=self.trained + 1)

    def _changed(
        self,
        *,
        begun: int | None = None,
        finished: frozenset[int] | None = None,
        trained: int | None = None,
    ) -> "Credits":
        return Credits(
            max_staleness=self.max_staleness,
            begun=self.begun if begun is None else begun,
            finished=self.finished if finished is None else finished,
            trained=self.trained if trained is None else trained,
        )


class CreditAccount:
    """Credits that threads wait for."""

    def __init__(self, max_staleness: int) -> None:
        self._credits = Credits(max_staleness=max_staleness)
        self._changed = threading.Condition()
        self._is_closed = False

    def wait_to_begin(self) -> int | None:
        """The number of the batch that may begin now, once there is a credit; None when the account is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._credits.may_begin)
            if self._is_closed:
                return None
            number = self._credits.begun
            self._credits = self._credits.begin()
            return number

    def finish(self, batch: int) -> None:
        """A batch is sampled."""
        with self._changed:
            self._credits = self._credits.finish(batch)
            self._changed.notify_all()

    def train(self) -> None:
        """The next batch was trained on, and its update published."""
        with self._changed:
            self._credits = self._credits.train()
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more may begin."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
