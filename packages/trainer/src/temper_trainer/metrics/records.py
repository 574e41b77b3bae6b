"""The rows of ``metrics.jsonl``: writing, reading back, and setting aside what a resumed run will do again."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

OWN_COUNT = "warm_start"
"""The phase that counts its own updates; rl, sft and eval count the run's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of ``metrics.jsonl``."""

    step: int
    """Of its phase; 0 is before the first."""
    phase: str
    """What was going on."""
    time_s: float
    """Seconds since the epoch."""
    values: Mapping[str, float]
    """By metric name; NaN and infinities included."""


def to_json(row: Row) -> str:
    """One line that every JSON reader takes: a value that is not finite becomes null and is named under ``not_finite``."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    head: dict[str, object] = {"step": row.step, "phase": row.phase, "time_s": round(row.time_s, 3)}
    odd = {name: str(value) for name, value in row.values.items() if not math.isfinite(value)}
    return json.dumps(head | finite | ({"not_finite": odd} if odd else {}), allow_nan=False)


def from_json(line: str) -> Row:
    """The row of a line; the inverse of ``to_json``."""
    fields = json.loads(line)
    step, phase, time_s = fields.pop("step"), fields.pop("phase"), fields.pop("time_s")
    odd = {name: float(text) for name, text in fields.pop("not_finite", {}).items()}
    return Row(
        step=step,
        phase=phase,
        time_s=time_s,
        values={name: odd.get(name, value) for name, value in fields.items()},
    )


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in order; a last line that a crash left unfinished is left out."""
    for line in _whole_lines(path):
        yield from_json(line)


def set_aside(path: Path, *, after_step: int, phase: str | None = None) -> int:
    """Move rows of later steps to ``NAME.superseded-N.jsonl``, so that no step appears twice and nothing is lost.

    Args:
        path: a file of JSON lines with ``step``, and ``phase`` where it is not a run's step that is counted; it may be missing.
        after_step: the last step that stays.
        phase: whose rows are meant; None means every phase that counts the run's steps, and so not the warm start.

    Returns:
        How many rows were moved.
    """
    lines = list(_whole_lines(path)) if path.exists() else []
    is_kept = [_is_kept(json.loads(line), after_step=after_step, phase=phase) for line in lines]
    moved = [line for line, kept in zip(lines, is_kept, strict=True) if not kept]
    if moved:
        _write_lines(superseded_name(path), moved)
    if path.exists():
        _write_lines(path, [line for line, kept in zip(lines, is_kept, strict=True) if kept])
    return len(moved)


def _is_kept(fields: Mapping[str, object], *, after_step: int, phase: str | None) -> bool:
    step, of = fields["step"], fields.get("phase")
    assert isinstance(step, int)
    is_meant = of != OWN_COUNT if phase is None else of == phase
    return step <= after_step or not is_meant


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def last_lines(path: Path, count: int, *, block_bytes: int = 1 << 16) -> list[str]:
    """Return the last complete lines of a file, reading it from its end."""
    with path.open("rb") as file:
        start, data = file.seek(0, os.SEEK_END), b""
        while start > 0 and data.count(b"\n") <= count:
            size = min(block_bytes, start)
            start -= size
            file.seek(start)
            data = file.read(size) + data
    lines = data.split(b"\n")
    # The last one has no line break and is cut off or empty; the first one may begin before the block.
    return [line.decode() for line in lines[1 if start > 0 else 0 : -1]][-count:]


def superseded_name(path: Path) -> Path:
    """``NAME.superseded-N.SUFFIX`` beside a file, with the first N that is free."""
    number = 1
    while (name := path.with_name(f"{path.stem}.superseded-{number}{path.suffix}")).exists():
        number += 1
    return name


def _write_lines(path: Path, lines: list[str]) -> None:
    """Replace a file in one step: a crash leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
