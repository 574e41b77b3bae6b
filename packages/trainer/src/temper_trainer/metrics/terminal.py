"""Terminal output of a run: one line per step, and live progress bars with a table of metrics."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from temper_trainer.progress import ProgressTask, list_active_tasks

NUM_RECENT = 20
"""Number of recent steps to average in the metric table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMetric:
    """A metric to show on a step's line."""

    metric: str
    label: str
    """Short name on the line."""
    format: Callable[[float], str]

    def format_value(self, value: float) -> str:
        """Format a value for the line; NaN and infinities as Python writes them."""
        return self.format(value) if math.isfinite(value) else str(value)


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def _rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


LINE_METRICS = (
    LineMetric(metric="eval/greedy/reward", label="greedy", format=_digits(3)),
    LineMetric(metric="eval/sampled/reward", label="sampled", format=_digits(3)),
    LineMetric(metric="reward/mean", label="reward", format=_digits(3)),
    LineMetric(metric="actor/loss", label="loss", format=_digits(4)),
    LineMetric(metric="critic/loss", label="value loss", format=_digits(4)),
    LineMetric(metric="actor/grad_norm", label="grad", format=_digits(3)),
    LineMetric(metric="policy/entropy", label="entropy", format=_digits(3)),
    LineMetric(metric="policy/ratio_mean", label="ratio", format=_digits(4)),
    LineMetric(metric="policy/ref_kl", label="kl", format=_digits(4)),
    LineMetric(metric="rollout/length_mean", label="length", format=_digits(1)),
    LineMetric(metric="rollout/tokens_per_s", label="tokens/s", format=_rate),
    LineMetric(metric="time/step_s", label="s", format=_digits(2)),
)
"""Metrics on the line of a step, in this order."""


def format_step_line(
    step: int, metrics: Mapping[str, float], *, phase: str, total: int | None
) -> str:
    """Format the most important metrics of a step as one line.

    Args:
        step: Step of the phase.
        metrics: Logged metrics; those that are not in `LINE_METRICS` are not shown.
        phase: Name of the phase, to print at the start of the line.
        total: Number of steps in the phase, if known.

    Example:
        >>> metrics = {"reward/mean": 0.4531, "actor/loss": 0.0123, "rollout/tokens_per_s": 5123.4}
        >>> format_step_line(12, metrics, phase="rl", total=220)
        'rl  12/220  reward 0.453  loss 0.0123  tokens/s 5.1k'
    """
    position = f"{step}" if total is None else f"{step:>{len(str(total))}}/{total}"
    values = [
        f"{item.label} {item.format_value(metrics[item.metric])}"
        for item in LINE_METRICS
        if item.metric in metrics
    ]
    return "  ".join([f"{phase} {position}", *values])


class Dashboard:
    """Context that keeps progress bars and a metric table at the bottom of a terminal.

    There is a bar for a phase's steps, and one for each operation in the current step
    (`temper_trainer.progress`). Lines are printed above them.
    """

    def __init__(self, console: Console, *, phase: str, total: int, start: int) -> None:
        self._steps = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total}"),
            TimeRemainingColumn(),
        )
        self._operations = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._step_bar = self._steps.add_task(phase, total=total, completed=start)
        self._bars: dict[ProgressTask, TaskID] = {}
        self._first_and_recent: dict[str, tuple[float, deque[float]]] = {}
        # transient: the terminal shows only the printed lines after the end.
        self._live = Live(
            console=console, get_renderable=self.render, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def advance(self, num_steps: int) -> None:
        """Advance the step bar."""
        self._steps.advance(self._step_bar, num_steps)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step to the table."""
        for item in LINE_METRICS:
            if item.metric in metrics:
                value = metrics[item.metric]
                _, recent = self._first_and_recent.setdefault(
                    item.metric, (value, deque(maxlen=NUM_RECENT))
                )
                recent.append(value)

    def render(self) -> Group:
        """Return what the terminal shows now; called by rich at every refresh."""
        self._update_operation_bars()
        rows = [self._row(item) for item in LINE_METRICS if item.metric in self._first_and_recent]
        if not rows:
            return Group(self._steps, self._operations)
        table = Table(
            "",
            "now",
            f"mean of {NUM_RECENT}",
            "first",
            box=None,
            header_style="dim",
            padding=(0, 2, 0, 0),
        )
        for row in rows:
            table.add_row(*row)
        return Group(table, self._steps, self._operations)

    def _row(self, item: LineMetric) -> tuple[str, str, str, str]:
        first, recent = self._first_and_recent[item.metric]
        return (
            item.label,
            item.format_value(recent[-1]),
            item.format_value(sum(recent) / len(recent)),
            item.format_value(first),
        )

    def _update_operation_bars(self) -> None:
        active = list_active_tasks()
        for finished in self._bars.keys() - set(active):
            self._operations.remove_task(self._bars.pop(finished))
        for task in active:
            if task not in self._bars:
                self._bars[task] = self._operations.add_task(task.name, total=task.total, count="")
            count = "" if task.total is None else f"{task.done:,}/{task.total:,}"
            self._operations.update(self._bars[task], completed=task.done, count=count)
