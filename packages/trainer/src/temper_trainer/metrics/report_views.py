"""The interactive parts of the report: the timeline of the newest steps, and a rollout viewer.

Their data is embedded in the page, and drawn by the scripts next to this file.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from temper_trainer.metrics.rollout_records import NUM_ROLLOUTS, ROLLOUTS_FILE
from temper_trainer.metrics.run_files import parse_line, read_last_lines
from temper_trainer.metrics.timeline import NUM_STEPS, TIMELINE_FILE

MAX_EMBEDDED_BYTES = 3 << 20
"""Maximum data size for each part of the page; older steps and rollouts are left out."""
VIEW_STYLE = """
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; fill: currentColor; }
svg .waiting, .key.waiting { fill: #cfd4da; background: #cfd4da; }
svg .sampling, .key.sampling { fill: #3f7fbf; background: #3f7fbf; }
svg .environment, .key.environment { fill: #e08a2e; background: #e08a2e; }
svg .scoring, .key.scoring { fill: #4c9a5f; background: #4c9a5f; }
svg .server { fill: #7c6bb0; shape-rendering: crispEdges; }
svg .axis, svg .mark { stroke: currentColor; stroke-opacity: 0.35; }
svg .mark { stroke-dasharray: 3 3; }
svg .right { text-anchor: end; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.35em 0 1em; }
select { font: inherit; max-width: 100%; margin-right: 1em; }
.segment { border-left: 3px solid #b9c0c9; padding-left: 0.7em; margin: 0.6em 0; }
.segment.completion { border-color: #3f7fbf; }
.segment.environment { border-color: #e08a2e; }
.role, .facts, .note { font-size: 12.5px; opacity: 0.8; }
.tokens { font: 12.5px/1.7 ui-monospace, monospace; white-space: pre-wrap; }
.tokens { overflow-wrap: anywhere; }
.token { border-radius: 2px; box-shadow: inset 1px 0 0 rgb(128 128 128 / 0.35); }
.token:hover { outline: 1px solid currentColor; }
#rollout-detail { position: sticky; top: 0; background: Canvas; }
#rollout-detail { font: 12.5px ui-monospace, monospace; }
#rollout-view { max-height: 34em; overflow-y: auto; }
"""


def draw_timeline(directory: Path) -> str:
    """Return the timeline for the newest steps and a table with their staleness; empty if none."""
    rows = _read_newest(directory / TIMELINE_FILE, count=NUM_STEPS)
    if not rows:
        return ""
    legend = "".join(
        f'<span class="key {name}"></span>{name}'
        for name in ("waiting", "sampling", "environment", "scoring")
    )
    return (
        f'<p><select id="timeline-step" aria-label="step"></select>{legend}</p>'
        '<div id="timeline-figure"></div><p class="note" id="timeline-note"></p>'
        + _tabulate_staleness(rows)
        + _embed(rows, identifier="timeline-data", script="timeline.js")
    )


def _tabulate_staleness(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the percentage of tokens per staleness; empty if all have the newest weights."""
    counts = [_read_counts(row) for row in rows]
    ages = sorted({age for each in counts for age in each})
    if ages in ([], [0]):
        return ""
    heading = "".join(f"<th class=number>{age}</th>" for age in ages)
    lines = "".join(
        f"<tr><td class=number>{row['step']}</td>"
        + "".join(f"<td class=number>{_percent(count, age)}</td>" for age in ages)
        + "</tr>"
        for row, count in zip(reversed(rows), reversed(counts), strict=True)
    )
    return (
        f"<details open><summary>tokens by staleness, in weight updates</summary><table>"
        f"<tr><th class=number>step</th>{heading}</tr>{lines}</table></details>"
    )


def _read_counts(row: Mapping[str, object]) -> dict[int, int]:
    counts = row.get("staleness")
    return {int(age): n for age, n in counts.items()} if isinstance(counts, dict) else {}


def _percent(counts: Mapping[int, int], age: int) -> str:
    total = sum(counts.values())
    return f"{100 * counts.get(age, 0) / total:.1f} %" if total else ""


def draw_rollouts(directory: Path) -> str:
    """Return the viewer of the newest recorded rollouts; empty if there are none."""
    rows = _read_newest(directory / ROLLOUTS_FILE, count=NUM_ROLLOUTS)
    if not rows:
        return ""
    # Newest steps first; rollouts of a step in their order.
    newest = sorted(rows, key=lambda row: row["step"], reverse=True)
    return (
        '<p><select id="rollout-choice" aria-label="rollout"></select>'
        '<select id="rollout-color" aria-label="color"><option value="logprob">color: log-prob'
        '</option><option value="version">color: weight version</option></select></p>'
        '<div id="rollout-detail"></div><div id="rollout-view"></div>'
        + _embed(newest, identifier="rollout-data", script="rollout_viewer.js")
    )


def _read_newest(path: Path, *, count: int) -> list[dict[str, Any]]:
    """Return the newest rows of a file that fit into the page, oldest first."""
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for line in reversed(read_last_lines(path, count) if path.exists() else []):
        num_bytes += len(line)
        if rows and num_bytes > MAX_EMBEDDED_BYTES:
            break
        if (row := parse_line(line)) is not None:
            rows.append(row)
    return rows[::-1]


def _embed(rows: Sequence[Mapping[str, object]], *, identifier: str, script: str) -> str:
    # Escape "<": a completion may contain "</script>", which would end the element.
    data = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    source = files("temper_trainer.metrics").joinpath(script).read_text(encoding="utf-8")
    return (
        f'<script type="application/json" id="{escape(identifier)}">{data}</script>'
        f"<script>{source}</script>"
    )
