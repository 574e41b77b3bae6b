"""Plot the metrics of a run from ``metrics.jsonl`` into ``curves.png``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from temper_trainer.metrics.run_files import METRICS_FILE, Row, read_latest_rows

STYLE = {
    "axes.edgecolor": "#8a8f98",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.alpha": 0.25,
    # The legend has a white background and no frame, so that curves do not cross its text.
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "legend.framealpha": 0.8,
    "lines.solid_capstyle": "round",
}
COLORS = ("#2563a8", "#c8551b", "#3a8a4d", "#7b4fa3")
NUM_COLUMNS = 2
WIDTH, HEIGHT = 5.6, 2.5
"""Size of a panel including its title and axis labels, in inches."""
# Use fixed margins instead of `tight_layout`, which draws the figure again to measure its texts and
# so takes most of the time.
LEFT, RIGHT, TOP, BOTTOM = 0.7, 0.3, 0.8, 0.5
"""Margins of the figure in inches."""
COLUMN_GAP, ROW_GAP = 0.7, 0.85
"""Gaps between panels in inches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot: metrics of one phase over its steps."""

    title: str
    phase: str
    metrics: tuple[str, ...]
    """Metrics to plot; those that the run did not log are skipped, and so is an empty panel."""
    is_fraction: bool = False
    """True if the y axis ranges from 0 to 1."""
    is_log: bool = False
    """True if the y axis is logarithmic when the values span more than a factor of ten."""
    hides_zeros: bool = False
    """True if the panel is left out while all its values are 0."""
    evaluations: tuple[str, ...] = ()
    """Metrics of evaluations to plot in addition."""
    is_wide: bool = False
    """True if the panel spans all columns; it is not empty if there are two evaluations of one
    kind.
    """


PANELS = (
    Panel(
        title="reward",
        phase="rl",
        metrics=("reward/mean",),
        evaluations=("eval/greedy/reward", "eval/sampled/reward", "eval/eval/reward"),
        is_fraction=True,
        is_wide=True,
    ),
    Panel(title="warm start: loss", phase="warm_start", metrics=("actor/loss",)),
    Panel(
        title="warm start: gradient norm",
        phase="warm_start",
        metrics=("actor/grad_norm",),
        is_log=True,
    ),
    Panel(title="sft: loss", phase="sft", metrics=("actor/loss",), evaluations=("eval/sft/loss",)),
    Panel(title="sft: gradient norm", phase="sft", metrics=("actor/grad_norm",), is_log=True),
    *(
        Panel(title=f"{phase}: entropy, nats per token", phase=phase, metrics=("policy/entropy",))
        for phase in ("sft", "dpo")
    ),
    *(
        panel
        for phase, kind in (("dpo", "reward"), ("rm", "score"))
        for panel in (
            Panel(
                title="pairs whose chosen completion is ahead",
                phase=phase,
                metrics=("preference/accuracy",),
                evaluations=("eval/preference/accuracy",),
                is_fraction=True,
            ),
            Panel(
                title=f"{kind}s of pairs",
                phase=phase,
                metrics=(
                    f"preference/chosen_{kind}",
                    f"preference/rejected_{kind}",
                    "preference/margin",
                ),
            ),
            Panel(
                title=f"{phase}: loss",
                phase=phase,
                metrics=("actor/loss",),
                evaluations=("eval/preference/loss",),
            ),
            Panel(
                title=f"{phase}: gradient norm",
                phase=phase,
                metrics=("actor/grad_norm",),
                is_log=True,
            ),
        )
    ),
    Panel(title="loss", phase="rl", metrics=("actor/loss", "critic/loss")),
    Panel(
        title="gradient norm",
        phase="rl",
        metrics=("actor/grad_norm", "critic/grad_norm"),
        is_log=True,
    ),
    Panel(
        title="completion length, tokens",
        phase="rl",
        metrics=("rollout/length_mean", "rollout/length_max"),
    ),
    Panel(title="entropy, nats per token", phase="rl", metrics=("policy/entropy",)),
    Panel(title="ratio of new to old policy", phase="rl", metrics=("policy/ratio_mean",)),
    Panel(
        title="divergence, nats per token",
        phase="rl",
        metrics=("policy/old_kl", "policy/ref_kl", "mismatch/kl"),
        is_log=True,
        hides_zeros=True,  # the sampler of one process computes what the policy does
    ),
    Panel(
        title="fractions",
        phase="rl",
        metrics=(
            "groups/zero_std_fraction",
            "rollout/truncated_fraction",
            "policy/clip_fraction_high",
        ),
        is_fraction=True,
    ),
    Panel(
        title="seconds per step",
        phase="rl",
        metrics=("time/step_s", "time/rollout_s", "time/update_s"),
    ),
    Panel(
        title="seconds per rollout",
        phase="rl",
        metrics=tuple(
            f"time/per_rollout/{phase}_s"
            for phase in ("waiting", "sampling", "environment", "scoring")
        ),
    ),
    Panel(
        title="staleness, updates",
        phase="rl",
        metrics=("staleness/mean", "staleness/max"),
        hides_zeros=True,
    ),
)


class PlainLogFormatter(LogFormatter):
    """Labels logarithmic ticks as 0.3 instead of 3 x 10^-1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return a tick's label; empty if the base class leaves it out."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw_curves(directory: Path) -> Path | None:
    """Draw ``curves.png`` into a run folder.

    Returns:
        The image's path; None if no metric of any panel was logged.
    """
    rows = read_latest_rows(directory / METRICS_FILE)
    panels = [panel for panel in PANELS if _has_values(panel, rows=rows)]
    if not panels:
        return None
    cells = _arrange_panels(panels)
    num_rows = cells[-1][0] + 1
    with mpl.rc_context(STYLE):
        width, height = WIDTH * NUM_COLUMNS, HEIGHT * num_rows + 0.5
        figure = Figure(figsize=(width, height))
        # pyplot would choose a backend that may need a display, and would keep every figure in
        # memory.
        FigureCanvasAgg(figure)
        figure.suptitle(
            directory.resolve().name,
            x=0.01,
            y=1 - 0.1 / height,
            ha="left",
            va="top",
            fontsize=13,
            fontweight="bold",
        )
        figure.subplots_adjust(
            left=LEFT / width,
            right=1 - RIGHT / width,
            top=1 - TOP / height,
            bottom=BOTTOM / height,
            wspace=COLUMN_GAP / (WIDTH - COLUMN_GAP),
            hspace=ROW_GAP / (HEIGHT - ROW_GAP),
        )
        grid = figure.add_gridspec(num_rows, NUM_COLUMNS)
        for panel, (line, column) in zip(panels, cells, strict=True):
            _draw_panel(
                figure.add_subplot(grid[line, :] if panel.is_wide else grid[line, column]),
                panel,
                rows=rows,
            )
        path = directory / "curves.png"
        partial = directory / ".curves.partial.png"
        figure.savefig(partial, dpi=130)
        # Atomic, so that neither a reader nor a killed process gets an incomplete image.
        partial.replace(path)
    return path


def _has_values(panel: Panel, *, rows: Sequence[Row]) -> bool:
    """Return True if the run logged something that the panel shows."""
    # A single evaluation is a number of the report, not a curve.
    if panel.is_wide and any(len(_points(rows, "eval", name)[0]) > 1 for name in panel.evaluations):
        return True
    values = [value for name in panel.metrics for value in _points(rows, panel.phase, name)[1]]
    return any(values) if panel.hides_zeros else bool(values)


def _arrange_panels(panels: Sequence[Panel]) -> list[tuple[int, int]]:
    """Return row and column per panel, row by row; a wide panel gets a full row."""
    cells, position = [], 0
    for panel in panels:
        position += position % NUM_COLUMNS if panel.is_wide else 0
        cells.append(divmod(position, NUM_COLUMNS))
        position += NUM_COLUMNS if panel.is_wide else 1
    return cells


def _points(rows: Sequence[Row], phase: str, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values for one metric, without non-finite values."""
    points = [
        (row.step, row.values[name]) for row in rows if row.phase == phase and name in row.values
    ]
    finite = sorted((step, value) for step, value in points if math.isfinite(value))
    return [step for step, _ in finite], [value for _, value in finite]


def _draw_panel(axes: Axes, panel: Panel, *, rows: Sequence[Row]) -> None:
    lowest, highest = math.inf, -math.inf
    for name, color in zip(panel.metrics, COLORS, strict=False):
        steps, values = _points(rows, panel.phase, name)
        if steps:
            _draw_curve(axes, steps, values, label=name, color=color)
            lowest, highest = min(lowest, *values), max(highest, *values)
    _draw_evaluations(axes, panel.evaluations, rows=rows)
    if panel.is_fraction:
        # A little beyond 0 and 1, so that a curve at a bound is not cut in half.
        axes.set_ylim(min(-0.02, lowest), None if axes.get_ylim()[1] > 1.05 else 1.02)
    if panel.is_log and 0 < 10 * lowest < highest:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PlainLogFormatter())
        # Less than two powers of ten may be in sight: label other numbers, too.
        axes.yaxis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(2, 0.5)))
    else:
        # Ratios are near 1: without this, ticks show the difference to an offset above the axis.
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(panel.title)
    axes.set_xlabel("update" if panel.phase in ("warm_start", "sft") else "step")
    axes.legend(loc="best")


def _draw_curve(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, label: str, color: str
) -> None:
    """Plot the values; from 40 steps on, plot them thin with their running mean on top."""
    window = len(steps) // 20 | 1  # always odd, see _running_mean
    if window == 1:
        axes.plot(
            steps,
            values,
            color=color,
            linewidth=1.4,
            label=label,
            marker="o" if len(steps) < 20 else "",
            markersize=3,
        )
        return
    axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
    axes.plot(
        steps,
        _running_mean(values, window=window),
        color=color,
        linewidth=1.7,
        label=f"{label}, mean of {window}",
    )


def _running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Return the centered mean over ``window`` (odd) values, over fewer at both ends."""
    half = window // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(values) / len(values) for values in windows]


def _draw_evaluations(axes: Axes, names: Sequence[str], *, rows: Sequence[Row]) -> None:
    for name, color, marker, label_offset in zip(
        names, COLORS[1:], "DsP", (9, -15, 9), strict=False
    ):
        steps, values = _points(rows, "eval", name)
        if not steps:
            continue
        kind, metric = name.split("/")[1:]
        label = f"held out, {kind if metric == 'reward' else metric}"
        axes.plot(
            steps,
            values,
            linestyle="--",
            linewidth=0.9,
            color=color,
            marker=marker,
            markersize=6,
            label=label,
            zorder=3,
        )
        for step, value in ((steps[0], values[0]), (steps[-1], values[-1])):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, label_offset),
                ha="center",
                fontsize=8,
                color=color,
            )
