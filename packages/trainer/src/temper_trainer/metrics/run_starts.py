"""Record each start of a run: its time, command line, versions and commit."""

import json
import time
from pathlib import Path

from temper_trainer.metrics.run_files import read_last_lines
from temper_trainer.versions import find_commit, list_installed_versions

STARTS_FILE = "starts.jsonl"
"""One JSON object per start of the run, the last one for the newest."""


def record_start(directory: Path, *, command: str) -> None:
    """Append this start; the command must not contain secrets."""
    start = {
        "time_s": round(time.time(), 3),
        "command": command,
        "commit": find_commit(),
        "versions": list_installed_versions(),
    }
    with (directory / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start, ensure_ascii=False) + "\n")


def read_starts(directory: Path) -> list[dict[str, object]]:
    """Return the recorded starts in order; damaged lines are left out."""
    path = directory / STARTS_FILE
    starts = []
    for line in read_last_lines(path, 1000) if path.exists() else []:
        try:
            fields = json.loads(line)
        except ValueError:  # not UTF-8 or not JSON, as a damaged disk leaves
            continue
        if isinstance(fields, dict):
            starts.append(fields)
    return starts
