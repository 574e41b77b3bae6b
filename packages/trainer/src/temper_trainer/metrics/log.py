"""The log of a run: everything that a loop says goes through one object, to files, to trackers and to the terminal."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from temper_trainer.config.ranges import LOOPBACK
from temper_trainer.metrics.dashboard import Dashboard
from temper_trainer.metrics.jsonl import JsonlTracker
from temper_trainer.metrics.lines import step_line
from temper_trainer.metrics.records import set_aside, superseded_name
from temper_trainer.metrics.report import write_report
from temper_trainer.metrics.tracker import Tracker

REPORT_INTERVAL_S = 60.0
"""Shortest time between two reports of a running run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One completion in the table of samples."""

    prompt: str
    """The question as text."""
    completion: str
    """What the model wrote."""
    answer: str
    """The reference answer."""
    reward: float
    """Its score."""


class Bar:
    """A progress bar, or nothing where the output is no terminal."""

    def __init__(self, dashboard: Dashboard | None) -> None:
        self._dashboard = dashboard

    def advance(self, num_steps: int = 1) -> None:
        """Move on."""
        if self._dashboard is not None:
            self._dashboard.advance(num_steps)


class RunLog(AbstractContextManager["RunLog"]):
    """The log of one run folder.

    Files: ``metrics.jsonl`` and ``tensorboard/`` where asked, ``samples.jsonl``, ``curves.png`` and ``report.html`` by ``report``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trackers: Sequence[str],
        progress: bool,
        resume_step: int | None = None,
        prometheus_port: int | None = None,
        prometheus_address: str = LOOPBACK,
        console: Console | None = None,
    ) -> None:
        """Open the files of a run.

        Args:
            directory: the run folder; made where it is missing.
            trackers: ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
            progress: show bars where the output is a terminal.
            resume_step: the last step that is done; rows of later steps are moved to ``*.superseded-N.jsonl``. None begins anew: all rows
                that lie there are moved, except those of a warm start, of which ``bar`` moves what is done again.
            prometheus_port: where the newest values are served, if anywhere.
            prometheus_address: of this machine, at which that port is opened.
            console: where lines go; standard output by default.

        Raises:
            ConfigError: a tracker whose package is not installed, or a port that is not free.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._console = (
            Console(soft_wrap=True, highlight=False, markup=False) if console is None else console
        )
        self._has_bars = progress and self._console.is_terminal
        self._totals: dict[str, int] = {}
        self._dashboard: Dashboard | None = None
        self._drawing = threading.Lock()
        self._reported_at: float | None = None
        self._report_interval_s = REPORT_INTERVAL_S
        done = -1 if resume_step is None else resume_step
        moved = [
            self._set_aside(name, after_step=done) for name in ("metrics.jsonl", "samples.jsonl")
        ]
        self._trackers: list[Tracker] = (
            []
            if prometheus_port is None
            else [_prometheus(prometheus_address, prometheus_port, directory)]
        )
        self._trackers += [_tracker(name, directory, is_superseded=moved[0]) for name in trackers]

    def _set_aside(self, name: str, *, after_step: int) -> bool:
        """Move rows of later steps, or a file that cannot be read; return whether any was moved."""
        path = self._directory / name
        try:
            return set_aside(path, after_step=after_step) > 0
        except ValueError as error:  # not UTF-8, or no JSON
            renamed = path.rename(superseded_name(path))
            self.say(f"warning: {path} cannot be read ({error}): renamed to {renamed.name}")
            return True

    def __enter__(self) -> Self:
        """The log itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close files and trackers."""
        for tracker in self._trackers:
            tracker.close(has_failed=error is not None)

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Record the numbers of a step and print its line; names and meanings are in docs/metrics.md."""
        for tracker in self._trackers:
            tracker.log(step, metrics, phase=phase)
        if self._dashboard is not None:
            self._dashboard.update(metrics)
        self.say(step_line(step, metrics, phase=phase, total=self._totals.get(phase)))

    @contextmanager
    def bar(self, phase: str, total: int, start: int = 0) -> Iterator[Bar]:
        """The steps of a phase: bars and a table of numbers on a terminal, their number for the line of a step, and rows of steps done
        again moved aside.

        Args:
            phase: what its lines are logged under.
            total: steps of the phase.
            start: steps already done.
        """
        self._totals[phase] = total
        if set_aside(self._directory / "metrics.jsonl", after_step=start, phase=phase):
            for tracker in self._trackers:
                tracker.begin_anew()
        if not self._has_bars:
            yield Bar(None)
            return
        with Dashboard(self._console, phase=phase, total=total, start=start) as self._dashboard:
            try:
                yield Bar(self._dashboard)
            finally:
                self._dashboard = None

    def show_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Print a table of completions, and append them to ``samples.jsonl``."""
        with (self._directory / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"step": step} | asdict(row), ensure_ascii=False) + "\n" for row in rows
            )
        table = Table(title=f"samples of step {step}", show_lines=True, title_justify="left")
        for heading in ("prompt", "completion", "answer", "reward"):
            table.add_column(
                heading, justify="right" if heading == "reward" else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(
                *(
                    Text(text.strip())
                    for text in (row.prompt, row.completion, row.answer, f"{row.reward:g}")
                )
            )
        self._console.print(table, soft_wrap=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self) -> Path | None:
        """Draw `curves.png` and write `report.html` from what is in the run folder; see `write_report`."""
        with (
            self._drawing
        ):  # matplotlib's settings are global, and a stop request draws from its own thread
            return write_report(self._directory)

    def refresh_report(self) -> None:
        """Write the report after the first step, then if it costs less than 1 % of the time since.

        A process that is killed then leaves a report that is at most minutes behind `metrics.jsonl`.
        """
        begin = time.monotonic()
        if self._reported_at is not None and begin - self._reported_at < self._report_interval_s:
            return
        self.try_report()
        self._reported_at = time.monotonic()
        self._report_interval_s = max(REPORT_INTERVAL_S, 100 * (self._reported_at - begin))

    def try_report(self) -> None:
        """Write the report; a failure is printed and does not end, or hide the end of, the run."""
        try:
            self.report()
        except Exception as error:  # noqa: BLE001 - files, fonts, a full disk: the metrics are safe in metrics.jsonl
            self.say(f"the report was not written: {type(error).__name__}: {error}")


def _prometheus(address: str, port: int, directory: Path) -> Tracker:
    from temper_trainer.metrics.prometheus import PrometheusTracker  # an extra

    return PrometheusTracker(address, port, token_file=directory / "prometheus_token")


def _tracker(name: str, directory: Path, *, is_superseded: bool) -> Tracker:
    if name == "tensorboard":
        from temper_trainer.metrics.tensorboard import TensorBoardTracker  # imports torch

        return TensorBoardTracker(directory)
    if name == "wandb":
        from temper_trainer.metrics.wandb import WandbTracker  # an extra

        return WandbTracker(directory)
    if name == "mlflow":
        from temper_trainer.metrics.mlflow import MlflowTracker  # an extra

        return MlflowTracker(directory, is_superseded=is_superseded)
    if name == "trackio":
        from temper_trainer.metrics.trackio import TrackioTracker  # an extra

        return TrackioTracker(directory, is_superseded=is_superseded)
    assert name == "jsonl", f"{name!r} is no tracker"
    return JsonlTracker(directory)
