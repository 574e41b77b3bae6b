"""Who waits for whom, and for how long: what a watchdog prints when a run stands still. Standard library alone."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    what: str
    describe_pending: Callable[[], str]
    since: float


_open: dict[int, _Wait] = {}


@contextmanager
def track_wait(what: str, *, describe_pending: Callable[[], str] = lambda: "") -> Iterator[None]:
    """The body waits for something.

    Args:
        what: such as ``actor: TrainingWorker.update``.
        describe_pending: asked when it is printed: which ranks or replicas have not answered yet.
    """
    wait = _Wait(what=what, describe_pending=describe_pending, since=time.monotonic())
    _open[id(wait)] = wait
    try:
        yield
    finally:
        del _open[id(wait)]


def describe_long_waits(longer_than_s: float) -> list[str]:
    """A sentence for each wait that is open for longer, the oldest first."""
    now = time.monotonic()
    found = sorted(
        (wait for wait in list(_open.values()) if now - wait.since > longer_than_s),
        key=lambda wait: wait.since,
    )
    return [
        f"waiting for {now - wait.since:.0f} s: {wait.what}{wait.describe_pending()}"
        for wait in found
    ]


class Watchdog:
    """A context in which long waits are told once per interval, by a thread of its own."""

    def __init__(self, interval_s: float | None, *, log: Callable[[str], None]) -> None:
        self._interval_s = interval_s
        self._log = log
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._interval_s is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._interval_s,), daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, interval_s: float) -> None:
        while not self._is_over.wait(interval_s):
            for sentence in describe_long_waits(interval_s):
                self._log(f"watchdog: {sentence}")
