"""Read and write the files of a run folder that record its metrics, settings and starts."""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from temper_trainer.versions import find_commit, list_installed_versions

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"
"""One JSON object per start of the run, the last one for the newest."""
WARM_START_PHASE = "warm_start"
"""The only phase with its own step counter; rl, sft and eval use the run's step."""

_PHASES_WITHOUT_STEPS = (WARM_START_PHASE, "eval", "generate")
"""Phases that have no row for each step in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of ``metrics.jsonl``.

    Example:
        >>> row = Row(step=3, phase="rl", time_s=1.5, values={"reward/mean": 0.25})
        >>> to_json(row)
        '{"step": 3, "phase": "rl", "time_s": 1.5, "reward/mean": 0.25}'
        >>> from_json(to_json(row)) == row
        True
    """

    step: int
    """Step of the phase; 0 is the state before the first step."""
    phase: str
    """``rl``, ``sft``, ``dpo``, ``rm``, ``warm_start``, ``eval`` or ``generate``."""
    time_s: float
    """Seconds since the Unix epoch."""
    values: Mapping[str, float]
    """Value by metric name, including NaN and infinities."""


def to_json(row: Row) -> str:
    """Return the row as standard JSON: a non-finite value is null and listed in ``not_finite``."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    head: dict[str, object] = {"step": row.step, "phase": row.phase, "time_s": round(row.time_s, 3)}
    odd = {name: str(value) for name, value in row.values.items() if not math.isfinite(value)}
    return json.dumps(head | finite | ({"not_finite": odd} if odd else {}), allow_nan=False)


def from_json(line: str) -> Row:
    """Parse a line that ``to_json`` wrote."""
    return _to_row(json.loads(line))


def _to_row(fields: Mapping[str, Any]) -> Row:
    odd = {name: float(text) for name, text in fields.get("not_finite", {}).items()}
    head = ("step", "phase", "time_s", "not_finite")
    return Row(
        step=fields["step"],
        phase=fields["phase"],
        time_s=fields["time_s"],
        values={name: odd.get(name, value) for name, value in fields.items() if name not in head},
    )


def _try_to_row(fields: Mapping[str, Any]) -> Row | None:
    """Return the row of a line that a disk may have damaged; None if it has."""
    try:
        row = _to_row(fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    numbers = (row.time_s, *row.values.values())
    is_text = isinstance(fields["phase"], str)
    return row if is_text and all(isinstance(each, int | float) for each in numbers) else None


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file in order; skip a last line that a crash left incomplete.

    Damaged lines are left out with a warning. A resume moves them to another file.
    """
    num_damaged = 0
    for line in _complete_lines(path):
        fields = parse_line(line)
        row = None if fields is None else _try_to_row(fields)
        if row is None:
            num_damaged += 1
        else:
            yield row
    if num_damaged:
        plural = ", which is" if num_damaged == 1 else "s, which are"
        logger.warning("%s has %d damaged line%s left out", path, num_damaged, plural)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the fields from a line of metrics or samples; None if it is damaged."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deep
        return None
    is_row = isinstance(fields, dict) and isinstance(fields.get("step"), int)
    return fields if is_row else None


def read_latest_rows(path: Path) -> list[Row]:
    """Read the rows from a file. If a step in a phase was logged twice, keep the last row."""
    return keep_latest(read_rows(path)) if path.exists() else []


def keep_latest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without those whose phase and step appear again later."""
    return list({(row.phase, row.step): row for row in rows}.values())


def supersede_rows(path: Path, *, after_step: int, phase: str | None = None) -> int:
    """Move rows of later steps to ``NAME.superseded-N.jsonl``.

    A resumed run repeats these steps. Moving the rows keeps steps unique without losing data.

    Args:
        path: A JSON lines file whose objects have ``step`` and optionally ``phase``. It may be
            missing.
        after_step: The last step to keep.
        phase: Move only this phase's rows. None selects all phases that count the steps of the
            run, which excludes the warm start.

    Returns:
        The number of rows that were moved.
    """
    lines = list(_complete_lines(path)) if path.exists() else []
    parsed = [parse_line(line) for line in lines]
    is_kept = [
        # Damaged lines are left to `move_damaged_lines`.
        fields is None or _is_kept(fields, after_step=after_step, phase=phase)
        for fields in parsed
    ]
    moved = [line for line, kept in zip(lines, is_kept, strict=True) if not kept]
    if moved:
        _write_lines(choose_superseded_path(path), moved)
    if path.exists():
        # Rewrite the file even if nothing was moved. This drops an incomplete last line, because
        # the next row would otherwise be appended to it.
        _write_lines(path, [line for line, kept in zip(lines, is_kept, strict=True) if kept])
    return len(moved)


def move_damaged_lines(path: Path) -> tuple[int, Path]:
    """Move lines that are no rows, as a damaged disk leaves, to ``NAME.superseded-N.jsonl``.

    Returns:
        Their number, and the file with them; it is not written if there are none.
    """
    lines = list(_complete_lines(path)) if path.exists() else []
    damaged = [line for line in lines if parse_line(line) is None]
    target = choose_superseded_path(path)
    if damaged:
        _write_lines(target, damaged)
        _write_lines(path, [line for line in lines if parse_line(line) is not None])
    return len(damaged), target


def find_missing_steps(path: Path, *, last_step: int) -> list[int]:
    """Return the completed steps without a row, for example after a disk lost part of the file.

    Steps before the first row are left out: a run that resumes from the checkpoint of another
    folder begins with a later step.
    """
    present = {
        row.step
        for row in read_rows(path)
        if row.phase not in _PHASES_WITHOUT_STEPS and 0 < row.step <= last_step
    }
    return [step for step in range(min(present, default=1), last_step + 1) if step not in present]


def _is_kept(fields: Mapping[str, Any], *, after_step: int, phase: str | None) -> bool:
    row_phase = fields.get("phase")
    is_selected = row_phase != WARM_START_PHASE if phase is None else row_phase == phase
    return fields["step"] <= after_step or not is_selected


def _complete_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def read_last_lines(path: Path, count: int, *, block_bytes: int = 1 << 16) -> list[bytes]:
    """Return the last complete lines of a file, reading it backwards in blocks."""
    with path.open("rb") as file:
        start, data = file.seek(0, os.SEEK_END), b""
        while start > 0 and data.count(b"\n") <= count:
            size = min(block_bytes, start)
            start -= size
            file.seek(start)
            data = file.read(size) + data
    lines = data.split(b"\n")
    # The last element is empty or an incomplete line; the first one may start before the block.
    return lines[1 if start > 0 else 0 : -1][-count:]


class BoundedLines:
    """Appends lines to a file that keeps only the newest lines."""

    def __init__(self, path: Path, *, num_kept: int) -> None:
        """Continue a file.

        Args:
            path: The file; it need not exist.
            num_kept: Minimum number of lines that are kept; the file has at most twice as many.
        """
        self._path = path
        self._num_kept = num_kept
        self._num_lines = sum(1 for _ in _complete_lines(path)) if path.exists() else 0

    def append(self, lines: Sequence[str]) -> None:
        """Append lines, and remove the oldest if there are too many."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._num_lines += len(lines)
        if self._num_lines > 2 * self._num_kept:
            kept = read_last_lines(self._path, self._num_kept)
            _write_lines(self._path, [line + b"\n" for line in kept])
            self._num_lines = len(kept)


def choose_superseded_path(path: Path) -> Path:
    """Return ``NAME.superseded-N.SUFFIX`` in the same folder, with the first N that is free."""
    number = 1
    while (name := path.with_name(f"{path.stem}.superseded-{number}{path.suffix}")).exists():
        number += 1
    return name


def _write_lines(path: Path, lines: list[bytes]) -> None:
    """Replace a file atomically: a crash leaves either the old or the new content."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(b"".join(lines))
    partial.replace(path)


def read_settings(directory: Path, *, name: str = "config.yaml") -> dict[str, object]:
    """Return the settings in a file by dotted key; empty if it is missing or unreadable.

    An unreadable file is only a warning: a full disk may have truncated it, and the next start
    writes it again.
    """
    path = directory / name
    if not path.exists():
        return {}
    try:
        tree = yaml.safe_load(path.read_bytes())
    # An impossible date is a ValueError, and brackets nested too deep are a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        logger.warning("%s cannot be read as settings: it is ignored", path)
        return {}
    return dict(flatten_settings(tree))


def flatten_settings(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield dotted keys and values from nested mappings; an empty mapping counts as a value.

    Example:
        >>> list(flatten_settings({"run": {"seed": 0}, "critic": None}))
        [('run.seed', 0), ('critic', None)]
    """
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
        # Not UTF-8, not JSON, or nested too deep, as a damaged disk leaves.
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(fields, dict)
            and isinstance(fields.get("command"), str)
            and isinstance(fields.get("time_s"), int | float)
        ):
            starts.append(fields)
    return starts


def list_run_starts(directory: Path, rows: Iterable[Row]) -> list[dict[str, object]]:
    """Return the recorded starts in order, without those that failed before the first row."""
    starts = read_starts(directory)
    first_s = min((row.time_s for row in rows), default=math.inf)
    num_before = sum(float(str(start["time_s"])) <= first_s for start in starts)
    return starts[max(0, num_before - 1) :]
