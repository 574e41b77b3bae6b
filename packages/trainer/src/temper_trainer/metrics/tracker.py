"""What a tracker does: take numbers, and be closed."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """A place where metrics go, beside ``metrics.jsonl``."""

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Record the numbers of one step of a phase."""

    def begin_anew(self) -> None:
        """Steps that were logged are done again: what stays of them lies in ``metrics.jsonl``."""

    def close(self, *, has_failed: bool) -> None:
        """Write out what is buffered.

        Args:
            has_failed: whether the run ends with an error.
        """
