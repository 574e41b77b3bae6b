"""Operations that this process has in progress, their times, and a watchdog for long waits.

Code that does the work counts items; the dashboard of the terminal reads the counts. The watchdog
logs long waits, in case a run hangs. Standard library only, because reward processes import this
module.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_lock = threading.Lock()
_active: list["ProgressTask"] = []


# Compared by identity: two operations may have the same name and counts, and the dashboard uses
# them as keys.
@dataclass(slots=True, eq=False)
class ProgressTask:
    """An operation in progress in this process."""

    name: str
    """Name of the operation, such as ``completions``."""
    total: int | None
    """Number of items; None if unknown."""
    done: int = 0
    """Number of items done so far."""


@contextmanager
def track_progress(name: str, *, total: int | None = None) -> Iterator[None]:
    """Show the body as an operation in progress; `advance_progress` counts its items.

    Example:
        >>> with track_progress("completions", total=8):
        ...     advance_progress("completions", 3)
        ...     [(task.name, task.done, task.total) for task in list_active_tasks()]
        [('completions', 3, 8)]
    """
    task = ProgressTask(name, total)
    with _lock:
        _active.append(task)
    try:
        yield
    finally:
        with _lock:
            _active.remove(task)


def advance_progress(name: str, count: int = 1) -> None:
    """Count items of the most recent operation with this name.

    No effect if there is none, as in a worker process.
    """
    with _lock:
        for task in reversed(_active):
            if task.name == name:
                task.done += count
                return


def list_active_tasks() -> list[ProgressTask]:
    """Return the operations in progress, in start order."""
    with _lock:
        return list(_active)


@dataclass(slots=True)
class StepTimer:
    """Measures how long the operations of one step take."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by metric name, such as ``time/rollout_s``."""

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the wall time of the body to ``time/NAME_s``, and show it as in progress."""
        start = time.perf_counter()
        try:
            with track_progress(name.replace("_", " ")):
                yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to ``time/NAME_s``."""
        metric = f"time/{name}_s"
        self.seconds[metric] = self.seconds.get(metric, 0.0) + seconds


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
    """Return a line for each thing waited for over `longer_than_s`, the longest wait first."""
    now = time.monotonic()
    # A copy, because other threads start and end waits meanwhile.
    waits = sorted(
        (wait for wait in list(_waits.values()) if now - wait.since > longer_than_s),
        key=lambda wait: wait.since,
    )
    # Hundreds of rollouts may wait for the same server: they share a line with the longest wait.
    by_text: dict[str, list[_Wait]] = {}
    for wait in waits:
        by_text.setdefault(f"{wait.description}{wait.describe_pending()}", []).append(wait)
    return [
        f"waiting for {now - same[0].since:.0f} s: {text}"
        + (f" ({len(same)} calls)" if len(same) > 1 else "")
        for text, same in by_text.items()
    ]


class Watchdog:
    """Context with a thread that reports long waits once per interval; None disables it."""

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
