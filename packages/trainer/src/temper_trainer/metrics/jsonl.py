"""Tracker ``jsonl``: one JSON object per line in ``metrics.jsonl``."""

import time
from collections.abc import Mapping
from pathlib import Path

from temper_trainer.metrics.records import Phase, Row, to_json


class JsonlTracker:
    """Appends to ``metrics.jsonl`` and flushes each line, so that it can be followed and survives a crash."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], *, phase: Phase) -> None:
        """Append one line."""
        self._file.write(to_json(Row(step=step, phase=phase, time_s=time.time(), values=metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
