"""Progress of the operations in the current step, and the time they take.

Code that does the work counts items; the dashboard of the terminal reads the counts. Standard
library only, because reward processes import this module.
"""

import threading
import time
from collections.abc import Iterator
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
    """Such as ``completions``."""
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

    No effect if there is none, as in the process of a worker.
    """
    with _lock:
        for task in reversed(_active):
            if task.name == name:
                task.done += count
                return


def list_active_tasks() -> list[ProgressTask]:
    """Return the operations in progress, in the order in which they started."""
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
        metric, start = f"time/{name}_s", time.perf_counter()
        try:
            with track_progress(name.replace("_", " ")):
                yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[metric] = self.seconds.get(metric, 0.0) + elapsed
