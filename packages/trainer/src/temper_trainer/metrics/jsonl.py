"""Tracker ``jsonl``: one JSON object per line in ``metrics.jsonl``."""

import time
from collections.abc import Mapping
from pathlib import Path

from temper_trainer.metrics.records import Row, to_json


class JsonlTracker:
    """Appends whole lines, each on disk before the next step begins: the file can be followed, and survives a crash."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.jsonl"

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Append one line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                to_json(Row(step=step, phase=phase, time_s=time.time(), values=metrics)) + "\n"
            )

    def begin_anew(self) -> None:
        """The log itself has moved those rows."""

    def close(self, *, has_failed: bool) -> None:
        """Nothing is held open."""
