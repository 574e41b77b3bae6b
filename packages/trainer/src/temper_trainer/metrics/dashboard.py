"""What a terminal shows while a phase runs: a bar of its steps, one for each part of the step under way, and the numbers that tell most."""

from collections import deque
from collections.abc import Mapping
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

from temper_trainer.metrics.lines import TELLING, Telling, shown
from temper_trainer.progress import ProgressTask, list_active_tasks

NUM_RECENT = 20
"""Steps of the running mean."""


class Dashboard:
    """A context in which bars and numbers stand at the bottom of a terminal; lines are printed above them."""

    def __init__(self, console: Console, *, phase: str, total: int, start: int) -> None:
        self._steps = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total}"),
            TimeRemainingColumn(),
        )
        self._parts = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._task = self._steps.add_task(phase, total=total, completed=start)
        self._of_part: dict[ProgressTask, TaskID] = {}
        self._seen: dict[str, tuple[float, deque[float]]] = {}
        self._live = Live(
            console=console, get_renderable=self.render, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        """Begin to show."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""
        self._live.stop()

    def advance(self, num_steps: int) -> None:
        """So many more steps are done."""
        self._steps.advance(self._task, num_steps)

    def update(self, metrics: Mapping[str, float]) -> None:
        """The numbers of a step."""
        for item in TELLING:
            if item.metric in metrics:
                value = metrics[item.metric]
                _, recent = self._seen.setdefault(item.metric, (value, deque(maxlen=NUM_RECENT)))
                recent.append(value)

    def render(self) -> Group:
        """As it is now."""
        self._follow_parts()
        rows = [self._row(item) for item in TELLING if item.metric in self._seen]
        if not rows:
            return Group(self._steps, self._parts)
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
        return Group(table, self._steps, self._parts)

    def _row(self, item: Telling) -> tuple[str, str, str, str]:
        first, recent = self._seen[item.metric]
        return (
            item.label,
            shown(item, recent[-1]),
            shown(item, sum(recent) / len(recent)),
            shown(item, first),
        )

    def _follow_parts(self) -> None:
        """A bar for each part under way, none for those that are over."""
        parts = list_active_tasks()
        for gone in self._of_part.keys() - set(parts):
            self._parts.remove_task(self._of_part.pop(gone))
        for each in parts:
            if each not in self._of_part:
                self._of_part[each] = self._parts.add_task(each.name, total=each.total, count="")
            count = "" if each.total is None else f"{each.done:,}/{each.total:,}"
            self._parts.update(self._of_part[each], completed=each.done, count=count)
