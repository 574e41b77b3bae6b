"""How far the parts of a step have come: who works counts, who shows asks. Standard library alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_lock = threading.Lock()
_open: list["ProgressTask"] = []


@dataclass(slots=True, eq=False)
class ProgressTask:
    """Something under way in this process."""

    name: str
    """Such as ``completions``."""
    total: int | None
    """How many there will be; None is not known."""
    done: int = 0
    """So far."""


@contextmanager
def track_progress(name: str, *, total: int | None = None) -> Iterator[None]:
    """The body works on something, whose pieces are counted by ``advance`` where there are any."""
    made = ProgressTask(name, total)
    with _lock:
        _open.append(made)
    try:
        yield
    finally:
        with _lock:
            _open.remove(made)


def advance_progress(name: str, count: int = 1) -> None:
    """So many more of the newest part of that name are done; nothing where none is open, as in a worker's process."""
    with _lock:
        for found in reversed(_open):
            if found.name == name:
                found.done += count
                return


def list_active_tasks() -> list[ProgressTask]:
    """Those under way, in the order in which they began."""
    with _lock:
        return list(_open)
