"""Write ``report.html``: one self-contained page with a run's results and settings.

It is made from the files of the run folder: result, command and duration, evaluations, curves,
timeline, rollouts, sampled completions, times, settings with their origins, and versions.
"""

import base64
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from temper_trainer.metrics.curves import draw_curves
from temper_trainer.metrics.evaluation_plots import draw_evaluations
from temper_trainer.metrics.evaluation_report import list_evaluations, tabulate_evaluations
from temper_trainer.metrics.headline import describe_result, format_duration, format_reward
from temper_trainer.metrics.report_views import VIEW_STYLE, draw_rollouts, draw_timeline
from temper_trainer.metrics.run_files import (
    METRICS_FILE,
    Row,
    list_run_starts,
    parse_line,
    read_last_lines,
    read_latest_rows,
    read_settings,
    read_starts,
)
from temper_trainer.versions import list_installed_versions

REPORT_FILE = "report.html"
NUM_SAMPLES = 100
"""Number of newest completions to show."""
MAX_OPEN_LINES = 12
"""Evaluation tables with more lines are folded."""
MAX_SAMPLE_CHARACTERS = 4000
"""A sample's longest text; samples.jsonl has the rest."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; color: #22262c; }
body { max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2em; border-bottom: 1px solid #d5d9df; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 3px 10px 3px 0; }
th, td { border-bottom: 1px solid #eceef1; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 30em; }
td { font-family: ui-monospace, monospace; font-size: 12.5px; }
td.text:first-child { min-width: 6em; }
@media (max-width: 700px) {
  table { display: block; overflow-x: auto; }
  #samples td.text { min-width: 8em; }
}
img { max-width: 100%; }
.result { font-size: 1.35em; font-weight: 600; margin: 0.2em 0 1em; }
code { font-size: 12.5px; overflow-wrap: anywhere; }
input { font: inherit; padding: 4px 8px; width: 24em; margin-bottom: 0.6em; }
td div { max-height: 16em; overflow-y: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #d3d7de; background: #15181d; }
  h2, th, td { border-color: #363c45; }
  /* Charts are dark on white: exchange brightness, keep hues. */
  img { filter: invert(0.91) hue-rotate(180deg); }
}
"""
SEARCH = """
document.getElementById("search").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(" ").filter(Boolean);
  for (const row of document.querySelectorAll("#samples tr:not(:first-child)")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
"""
"""Hides samples that lack any word in the search field."""

Cells = Sequence[object]


def write_report(directory: Path) -> Path | None:
    """Draw `curves.png` and write `report.html` into a run folder.

    The run may still be running, finished, or killed.

    Returns:
        The report's path; None if the run has not logged a step.
    """
    rows = read_latest_rows(directory / METRICS_FILE)
    if not rows:
        return None
    result = describe_result(rows)
    sections = {
        "Run": _render_summary(directory, rows),
        "Curves": _render_curves(draw_curves(directory)),
        "Evaluations": _render_evaluations(rows),
        "Timeline": draw_timeline(directory),
        "Rollouts": draw_rollouts(directory),
        "Samples": _render_samples(directory / "samples.jsonl"),
        "Time": _format_times(rows),
        "First and last step": _compare_first_and_last(rows),
        "Configuration": _render_configuration(directory),
        "Environment": _render_environment(read_starts(directory)),
    }
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections.items() if text)
    title = escape(directory.resolve().name)
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    style = f"<style>{STYLE}{VIEW_STYLE}</style>"
    head = f'<meta charset="utf-8">{viewport}<title>{title}</title>{style}'
    headline = f'<p class="result">{escape(result)}</p>' if result else ""
    page = f'<!doctype html><html lang="en">{head}<h1>{title}</h1>{headline}{body}</html>'
    path = directory / REPORT_FILE
    # Renamed when complete, so that neither a reader nor a killed process gets half a page.
    partial = path.with_name(f".{REPORT_FILE}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.rename(path)
    return path


def _render_summary(directory: Path, rows: Sequence[Row]) -> str:
    """Return a table of when and how the run was started, and how long it took."""
    starts = list_run_starts(directory, rows)
    times = [row.time_s for row in rows]
    if starts:
        times.append(float(str(starts[0]["time_s"])))
    steps = [f"{phase} {step}" for phase, step in _count_steps(rows).items()]
    duration = format_duration(max(times) - min(times))
    if len(starts) > 1:
        last = format_duration(max(0.0, max(times) - float(str(starts[-1]["time_s"]))))
        duration += f" since the first start, {last} since the last"
    lines: list[Cells] = [
        ("started", _format_time(min(times))),
        ("duration", f"{duration}, until the last metrics at {_format_time(max(times))}"),
        ("steps", ", ".join(steps)),
    ]
    if len(starts) > 1:
        resumed = (_format_time(float(str(start["time_s"]))) for start in starts[1:])
        lines.append(("resumed", ", ".join(resumed)))
    lines += _list_rewards(read_settings(directory))
    if starts:
        lines.append(("command", starts[-1]["command"]))
        if commit := starts[-1].get("commit"):
            lines.append(("commit", commit))
        versions = _get_versions(starts)
        lines.append(("versions", ", ".join(f"{each} {versions[each]}" for each in versions)))
    return _render_table(("", ""), lines)


def _list_rewards(settings: Mapping[str, object]) -> list[Cells]:
    """Return the main reward if a data source uses it, and those of sources with their own."""
    prefix = "reward.components."
    weights = {
        key.removeprefix(prefix): float(str(value))
        for key, value in settings.items()
        if key.startswith(prefix)
    }
    main = format_reward(weights) or settings.get("reward.function")
    rewards = {
        source[1]: value
        for key, value in settings.items()
        if (source := re.fullmatch(r"(data\..+)\.reward", key))
    }
    own = {source: name for source, name in rewards.items() if name is not None}
    # A settings file without sources is damaged or older: the main reward is the best guess.
    uses_main = main is not None and (not rewards or len(own) < len(rewards))
    lines: list[Cells] = [("reward", main)] if uses_main else []
    return lines + [(f"reward of {source}", name) for source, name in own.items()]


def _count_steps(rows: Sequence[Row]) -> dict[str, int]:
    """Return the last step per phase, without evaluations."""
    last: dict[str, int] = {}
    for row in rows:
        if row.phase != "eval":
            last[row.phase] = max(row.step, last.get(row.phase, 0))
    return last


def _format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _render_evaluations(rows: Sequence[Row]) -> str:
    """Return the table of evaluations and their plot."""
    evaluations = list_evaluations(rows)
    picture = draw_evaluations(evaluations)
    plot = "" if picture is None else _embed(picture, alt="evaluations with confidence intervals")
    heading, lines = tabulate_evaluations(evaluations)
    table = _render_table(heading, lines)
    if len(lines) > MAX_OPEN_LINES:
        table = f"<details><summary>{len(lines)} evaluations</summary>{table}</details>"
    return plot + table


def _render_curves(path: Path | None) -> str:
    return "" if path is None else _embed(path.read_bytes(), alt="curves of the run")


def _embed(picture: bytes, *, alt: str) -> str:
    data = base64.b64encode(picture).decode()
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _compare_first_and_last(rows: Sequence[Row]) -> str:
    """Return a table with the first and last value per metric, without evaluations."""
    lines: list[Cells] = []
    for phase in dict.fromkeys(row.phase for row in rows if row.phase != "eval"):
        phase_rows = sorted((row for row in rows if row.phase == phase), key=lambda row: row.step)
        for name in sorted({name for row in phase_rows for name in row.values}):
            points = [(row.step, row.values[name]) for row in phase_rows if name in row.values]
            lines.append((phase, name, *points[0], *points[-1]))
    table = _render_table(("phase", "metric", "step", "first", "step", "last"), lines)
    return f"<details><summary>{len(lines)} metrics</summary>{table}</details>"


def _format_times(rows: Sequence[Row]) -> str:
    """Return a table of the time in each phase and operation: total, median and percentage."""
    lines: list[Cells] = []
    for phase in dict.fromkeys(row.phase for row in rows):
        seconds: dict[str, list[float]] = {}
        for row in rows:
            if row.phase == phase:
                for name, value in row.values.items():
                    # Parts of a step; not those of a rollout, such as time/per_rollout/waiting_s.
                    if re.fullmatch(r"time/\w+", name) and math.isfinite(value):
                        seconds.setdefault(name, []).append(value)
        total = sum(seconds.get("time/step_s", []))
        for name, values in sorted(seconds.items(), key=lambda item: -sum(item[1])):
            percentage = f"{100 * sum(values) / total:.0f} %" if total else ""
            lines.append(
                (
                    phase,
                    name.removeprefix("time/").removesuffix("_s"),
                    len(values),
                    format_duration(sum(values)),
                    format_duration(statistics.median(values)),
                    percentage,
                )
            )
    heading = ("phase", "operation", "steps", "total", "median per step", "of the step")
    return _render_table(heading, lines)


def _render_samples(path: Path) -> str:
    if not path.exists():
        return ""
    parsed = [parse_line(line) for line in read_last_lines(path, NUM_SAMPLES)]
    rows = [fields for fields in parsed if fields is not None]
    names = ("step", "kind", "prompt", "completion", "answer", "reward")
    lines = [tuple(_shorten(row.get(name)) for name in names) for row in reversed(rows)]
    field = '<input id="search" type="search" placeholder="search these samples">'
    table = f'<div id="samples">{_render_table(names, lines)}</div>'
    return f"{field}{table}<script>{SEARCH}</script>"


def _shorten(value: object) -> object:
    if not isinstance(value, str) or len(value) <= MAX_SAMPLE_CHARACTERS:
        return value
    num_left = len(value) - MAX_SAMPLE_CHARACTERS
    return f"{value[:MAX_SAMPLE_CHARACTERS]} ... {num_left} more characters in samples.jsonl"


def _render_configuration(directory: Path) -> str:
    """Return a table with changed settings, and a folded one with all settings."""
    values = read_settings(directory)
    origins = read_settings(directory, name="config_origins.yaml")
    if not (values and origins):
        return ""
    lines = [(key, _to_text(values.get(key)), origin) for key, origin in origins.items()]
    heading = ("key", "value", "set by")
    changed = _render_table(heading, [line for line in lines if line[2] != "default"])
    summary = f"<summary>all {len(lines)} settings</summary>"
    return f"{changed}<details>{summary}{_render_table(heading, lines)}</details>"


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _render_environment(starts: Sequence[Mapping[str, object]]) -> str:
    """Return a table with this machine and the versions that the last start recorded."""
    import torch  # slow to import: only when a report is written

    lines: list[Cells] = [
        ("system", f"{platform.platform()}, {os.cpu_count()} CPU cores"),
        ("Python", platform.python_version()),
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append(("GPUs of the driver", ", ".join(names)))
    lines += _get_versions(starts).items()
    return _render_table(("component", "version"), lines)


def _get_versions(starts: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the versions that the last start recorded; without them, those installed now."""
    recorded = starts[-1].get("versions") if starts else None
    versions = recorded if isinstance(recorded, dict) else list_installed_versions()
    return {str(name): str(version) for name, version in versions.items()}


def _render_table(heading: Sequence[str], lines: Sequence[Cells]) -> str:
    """Return an HTML table, or an empty string if there are no lines."""
    if not lines:
        return ""
    is_number = [isinstance(cell, (int, float)) for cell in lines[0]]
    head = "".join(
        f"<th{' class=number' if right else ''}>{escape(text)}</th>"
        for text, right in zip(heading, is_number, strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(map(_render_row, lines))}</table>"


def _render_row(cells: Cells) -> str:
    columns = []
    for cell in cells:
        if isinstance(cell, (int, float)):
            columns.append(f"<td class=number>{_format_number(cell)}</td>")
        else:
            # Escaped: completions of a model may contain any markup.
            text = escape("" if cell is None else str(cell))
            columns.append(f"<td class=text><div>{text}</div></td>")
    return f"<tr>{''.join(columns)}</tr>"


def _format_number(value: float) -> str:
    """Return a number with at least four digits where it has them, and no long tail.

    Example:
        >>> [_format_number(each) for each in (3, 0.9, 0.84412, 163.639, 15234.7, 0.000102259, 0.0)]
        ['3', '0.900', '0.844', '163.6', '15,235', '1.02e-04', '0']
    """
    if value == int(value) if math.isfinite(value) else True:
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2e}"
