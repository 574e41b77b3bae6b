"""Track what the process waits for, so that a watchdog can name it if a run hangs.

Standard library only.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    description: str
    describe_pending: Callable[[], str]
    since: float


_waits: dict[int, _Wait] = {}


@contextmanager
def track_wait(
    description: str, *, describe_pending: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Record that the body waits for something.

    Args:
        description: What is waited for, such as ``actor: TrainingWorker.update``.
        describe_pending: Called when the wait is printed; returns who has not answered yet, such as
            ``; ranks [0, 2] have not answered``.
    """
    wait = _Wait(description=description, describe_pending=describe_pending, since=time.monotonic())
    _waits[id(wait)] = wait
    try:
        yield
    finally:
        del _waits[id(wait)]


def describe_long_waits(longer_than_s: float) -> list[str]:
    """Return a line for each current wait that is longer, the longest first."""
    now = time.monotonic()
    # A copy, because other threads start and end waits meanwhile.
    waits = sorted(
        (wait for wait in list(_waits.values()) if now - wait.since > longer_than_s),
        key=lambda wait: wait.since,
    )
    return [
        f"waiting for {now - wait.since:.0f} s: {wait.description}{wait.describe_pending()}"
        for wait in waits
    ]


class Watchdog:
    """Context in which a thread reports long waits once per interval; None disables it."""

    def __init__(self, interval_s: float | None, *, log: Callable[[str], None]) -> None:
        self._interval_s = interval_s
        self._log = log
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._interval_s is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._interval_s,), daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, interval_s: float) -> None:
        while not self._is_stopped.wait(interval_s):
            for line in describe_long_waits(interval_s):
                self._log(f"watchdog: {line}")
