"""The log of a run: metrics and messages go to the terminal, to files and to trackers."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from temper_trainer.config.run import LOOPBACK
from temper_trainer.metrics.prometheus import PrometheusTracker
from temper_trainer.metrics.rollout_records import (
    NUM_ROLLOUTS,
    ROLLOUTS_FILE,
    Decode,
    to_json_line,
    to_rollout_row,
)
from temper_trainer.metrics.run_files import (
    METRICS_FILE,
    BoundedLines,
    find_missing_steps,
    move_damaged_lines,
    supersede_rows,
)
from temper_trainer.metrics.terminal import Dashboard, format_step_line
from temper_trainer.metrics.timeline import (
    NUM_STEPS,
    TIMELINE_FILE,
    StepTimeline,
    to_timeline_row,
)
from temper_trainer.metrics.trackers import Tracker, open_tracker
from temper_trainer.redaction import escape_control_characters, redact_secrets
from temper_trainer.types import Rollout

REPORT_INTERVAL_S = 60.0
"""Minimum time between two reports during a run."""
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One completion in the table of samples."""

    prompt: str
    completion: str
    answer: str
    """The prompt's reference answer."""
    reward: float
    """NaN if the completion could not be scored."""


class ProgressBar:
    """Progress bar of a phase; no effect if the output is not a terminal."""

    def __init__(self, dashboard: Dashboard | None) -> None:
        self._dashboard = dashboard

    def advance(self, num_steps: int = 1) -> None:
        """Move the bar forward."""
        if self._dashboard is not None:
            self._dashboard.advance(num_steps)


class _Output(Console):
    """Standard output."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled.

        The base class raises SystemExit, with which the run would end without a message.
        """
        raise  # noqa: PLE0704 - called in an except block


class RunLog(AbstractContextManager["RunLog"]):
    """The log of one run folder; as a context it closes its trackers.

    It writes the files of the configured trackers, ``samples.jsonl``, and with `report` also
    ``curves.png`` and ``report.html``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trackers: Sequence[str],
        progress: bool,
        writes_report: bool = True,
        resume_step: int | None = None,
        prometheus_port: int | None = None,
        prometheus_address: str = LOOPBACK,
        console: Console | None = None,
    ) -> None:
        """Open a run's trackers.

        Args:
            directory: The run folder; created if it is missing.
            trackers: Names from ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
            progress: Show progress bars if the output is a terminal.
            writes_report: Write `curves.png` and `report.html`. False ignores requests to do so.
            resume_step: The last completed step. Rows of later steps are moved to
                ``*.superseded-N.jsonl``. None starts from scratch and moves all existing rows. Warm
                start rows stay until that phase's `progress_bar` moves them.
            prometheus_port: Port that serves the latest values; None serves nothing.
            prometheus_address: Address of this host on which the port is opened.
            console: Where lines are printed; standard output by default.

        Raises:
            ConfigError: If the package of a tracker is not installed, or the port is not free.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._console = (
            _Output(soft_wrap=True, highlight=False, markup=False) if console is None else console
        )
        self._has_bars = progress and self._console.is_terminal
        self._totals: dict[str, int] = {}
        self._dashboard: Dashboard | None = None
        # matplotlib's settings are global, and a stop request writes a report from its own thread.
        self._report_lock = threading.Lock()
        self._reported_at: float | None = None
        self._report_interval_s = REPORT_INTERVAL_S
        self._writes_report = writes_report
        done = -1 if resume_step is None else resume_step  # rows of step 0 are repeated, too
        has_moved = self._supersede(METRICS_FILE, after_step=done)
        for name in (SAMPLES_FILE, TIMELINE_FILE, ROLLOUTS_FILE):
            self._supersede(name, after_step=done)
        self._timeline = BoundedLines(directory / TIMELINE_FILE, num_kept=NUM_STEPS)
        self._rollouts = BoundedLines(directory / ROLLOUTS_FILE, num_kept=NUM_ROLLOUTS)
        if "jsonl" in trackers:
            self._warn_about_missing_rows(last_step=done)
        self._trackers: list[Tracker] = []
        if prometheus_port is not None:
            token_file = directory / "prometheus_token"
            self._trackers.append(
                PrometheusTracker(prometheus_address, prometheus_port, token_file=token_file)
            )
        # Open trackers after the rows were moved, because some read back the rows that are still
        # valid.
        self._trackers += [
            open_tracker(name, directory, is_superseded=has_moved) for name in trackers
        ]

    def _supersede(self, name: str, *, after_step: int) -> bool:
        """Move rows of later steps, and damaged lines; return True if anything was moved."""
        path = self._directory / name
        num_damaged, target = move_damaged_lines(path)
        if num_damaged:
            lines = "line" if num_damaged == 1 else "lines"
            self.print_line(
                f"WARNING: {path} has {num_damaged} damaged {lines}: moved to {target.name}"
            )
        return supersede_rows(path, after_step=after_step) > 0 or num_damaged > 0

    def _warn_about_missing_rows(self, *, last_step: int) -> None:
        path = self._directory / METRICS_FILE
        missing = find_missing_steps(path, last_step=last_step) if path.exists() else []
        if not missing:
            return
        steps = (
            f"no row of step {missing[0]}"
            if len(missing) == 1
            else f"no rows of steps {missing[0]} to {missing[-1]}"
            if len(missing) == missing[-1] - missing[0] + 1
            else f"no rows of {len(missing)} steps from {missing[0]} to {missing[-1]}"
        )
        self.print_line(
            f"WARNING: {path} has {steps}, although the checkpoint has completed step {last_step}: "
            "the file was damaged. Curves and report leave them out; the training is not affected."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for tracker in self._trackers:
            tracker.close(has_failed=error is not None)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], *, phase: str, prints_line: bool = True
    ) -> None:
        """Record the metrics of a step and print its line; docs/metrics.md explains all names."""
        for tracker in self._trackers:
            tracker.log(step, metrics, phase=phase)
        if self._dashboard is not None:
            self._dashboard.update(metrics)
        if prints_line:
            total = self._totals.get(phase)
            self.print_line(format_step_line(step, metrics, phase=phase, total=total))

    @contextmanager
    def progress_bar(self, phase: str, total: int, start: int = 0) -> Iterator[ProgressBar]:
        """Show the progress of a phase while the body runs.

        Rows of earlier starts are moved if this phase repeats their steps.

        Args:
            phase: Phase of the metrics logged in the body.
            total: Number of steps in the phase.
            start: Number of completed steps.
        """
        self._totals[phase] = total
        if supersede_rows(self._directory / METRICS_FILE, after_step=start, phase=phase):
            for tracker in self._trackers:
                tracker.on_rewind()
        if not self._has_bars:
            yield ProgressBar(None)
            return
        with Dashboard(self._console, phase=phase, total=total, start=start) as self._dashboard:
            try:
                yield ProgressBar(self._dashboard)
            finally:
                self._dashboard = None

    def show_samples(
        self, step: int, rows: Sequence[SampleRow], *, kind: Literal["training", "held-out"]
    ) -> None:
        """Print a table of completions, and append them to ``samples.jsonl``, without secrets.

        Args:
            step: Step when they were sampled.
            rows: The completions.
            kind: What their prompts are for.
        """
        rows = [
            replace(
                row,
                prompt=redact_secrets(row.prompt),
                completion=redact_secrets(row.completion),
                answer=redact_secrets(row.answer),
            )
            for row in rows
        ]
        with (self._directory / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"step": step, "kind": kind} | asdict(row), ensure_ascii=False) + "\n"
                for row in rows
            )
        table = Table(title=f"{kind} samples of step {step}", show_lines=True, title_justify="left")
        for heading in ("prompt", "completion", "answer", "reward"):
            table.add_column(
                heading, justify="right" if heading == "reward" else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(
                *(
                    Text(escape_control_characters(text.strip()))
                    for text in (row.prompt, row.completion, row.answer, f"{row.reward:g}")
                )
            )
        self._console.print(table, soft_wrap=False)

    def add_timeline(self, timeline: StepTimeline) -> None:
        """Append a step to ``timeline.jsonl``, which keeps the newest steps."""
        row = json.dumps(to_timeline_row(timeline), separators=(",", ":"), allow_nan=False)
        self._timeline.append([row])

    def add_rollouts(self, step: int, rollouts: Sequence[Rollout], *, decode: Decode) -> None:
        """Append rollouts to ``rollouts.jsonl``, which keeps the newest rollouts.

        Args:
            step: Number of the step.
            rollouts: Rollouts of the step.
            decode: Decodes tokens, with special tokens.
        """
        self._rollouts.append(
            [to_json_line(to_rollout_row(each, step=step, decode=decode)) for each in rollouts]
        )

    def print_line(self, text: str) -> None:
        """Print a line without wrapping, secrets, markup and control characters."""
        text = escape_control_characters(redact_secrets(text))
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self) -> Path | None:
        """Draw `curves.png` and write `report.html`, unless turned off; see `write_report`."""
        if not self._writes_report:
            return None
        # Imported here, because it imports matplotlib, which a run without a report does not need.
        from temper_trainer.metrics.report import write_report

        with self._report_lock:
            return write_report(self._directory)

    def refresh_report(self) -> None:
        """Write the report after the first step, and later in at most 1 % of the time.

        So a killed process leaves a report that is at most minutes older than `metrics.jsonl`.
        """
        begin = time.monotonic()
        if self._reported_at is not None and begin - self._reported_at < self._report_interval_s:
            return
        self.try_report()
        self._reported_at = time.monotonic()
        self._report_interval_s = max(REPORT_INTERVAL_S, 100 * (self._reported_at - begin))

    def try_report(self) -> None:
        """Write the report; print a failure instead of raising it."""
        try:
            self.report()
        # Fonts, a full disk, ...: a missing report must not end a run whose metrics are saved, nor
        # replace the error that ends it.
        except Exception as error:  # noqa: BLE001
            self.print_line(f"the report was not written: {type(error).__name__}: {error}")
