"""What a tracker does: take numbers, and be closed."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """A place where metrics go, beside ``metrics.jsonl``."""

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Record the numbers of one step of a phase."""

    def close(self) -> None:
        """Write out what is buffered."""
