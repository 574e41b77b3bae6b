"""The picture of a run's curves, drawn from ``metrics.jsonl``: what was learned, how, and how it was evaluated."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from temper_trainer.metrics.records import Row, read_rows

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
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
COLOURS = ("#2563a8", "#c8551b", "#3a8a4d", "#7b4fa3")
NUM_COLUMNS = 2
WIDTH, HEIGHT = 5.6, 2.5
"""Inches of a panel with what stands around it."""
LEFT, RIGHT, ABOVE, BELOW = 0.7, 0.15, 0.8, 0.5
"""Inches around all panels. They are not measured by drawing everything first, which takes most of the time of a picture."""
BESIDE, BETWEEN = 0.7, 0.85
"""Inches from one panel to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One small picture: some metrics of one phase over its steps."""

    title: str
    """Above it."""
    phase: str
    """Whose rows are drawn."""
    metrics: tuple[str, ...]
    """Drawn where a run has them; a panel without any is left out."""
    is_share: bool = False
    """Whether the axis runs from 0 to 1."""
    is_log: bool = False
    """Whether the axis is logarithmic where values span more than a factor of ten."""
    is_wide: bool = False
    """Whether it takes the whole width; it also carries the evaluation points."""


PANELS = (
    Panel(title="reward", phase="rl", metrics=("reward/mean",), is_share=True, is_wide=True),
    Panel(title="warm start: loss", phase="warm_start", metrics=("actor/loss",)),
    Panel(
        title="warm start: gradient norm",
        phase="warm_start",
        metrics=("actor/grad_norm",),
        is_log=True,
    ),
    Panel(title="sft: loss", phase="sft", metrics=("actor/loss",)),
    Panel(title="sft: gradient norm", phase="sft", metrics=("actor/grad_norm",), is_log=True),
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
    Panel(title="ratio of new to old policy", phase="rl", metrics=("policy/ratio_mean",)),
    Panel(
        title="divergence, nats a token",
        phase="rl",
        metrics=("policy/old_kl", "policy/ref_kl", "mismatch/kl"),
        is_log=True,
    ),
    Panel(
        title="shares",
        phase="rl",
        metrics=("groups/dead_share", "rollout/cut_share", "policy/clip_share_high"),
        is_share=True,
    ),
    Panel(
        title="seconds a step",
        phase="rl",
        metrics=("time/step_s", "time/rollout_s", "time/update_s"),
    ),
)

EVALUATIONS = ("eval/greedy/reward", "eval/sampled/reward", "eval/eval/reward")


def draw_curves(directory: Path) -> Path | None:
    """Draw ``curves.png`` into a run folder.

    Returns:
        Its path; None where no metric of any panel was logged.
    """
    source = directory / "metrics.jsonl"
    rows = _last_of_each(read_rows(source)) if source.exists() else []
    panels = [
        panel
        for panel in PANELS
        if any(_points(rows, panel.phase, name)[0] for name in panel.metrics)
    ]
    if not panels:
        return None
    cells = _cells(panels)
    num_rows = cells[-1][0] + 1
    with mpl.rc_context(STYLE):
        width, height = WIDTH * NUM_COLUMNS, HEIGHT * num_rows + 0.5
        figure = Figure(figsize=(width, height))
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
            top=1 - ABOVE / height,
            bottom=BELOW / height,
            wspace=BESIDE / (WIDTH - BESIDE),
            hspace=BETWEEN / (HEIGHT - BETWEEN),
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
        partial.replace(path)  # a reader, or a kill, never meets half a picture
    return path


def _cells(panels: Sequence[Panel]) -> list[tuple[int, int]]:
    """Row and column of each panel, filled from left to right; a wide one has its row to itself."""
    cells, place = [], 0
    for panel in panels:
        place += place % NUM_COLUMNS if panel.is_wide else 0
        cells.append(divmod(place, NUM_COLUMNS))
        place += NUM_COLUMNS if panel.is_wide else 1
    return cells


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    """The rows, the last one where a step of a phase was logged twice."""
    return list({(row.phase, row.step): row for row in rows}.values())


def _points(rows: Sequence[Row], phase: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one metric."""
    found = [
        (row.step, row.values[name]) for row in rows if row.phase == phase and name in row.values
    ]
    finite = sorted((step, value) for step, value in found if math.isfinite(value))
    return [step for step, _ in finite], [value for _, value in finite]


def _draw_panel(axes: Axes, panel: Panel, *, rows: Sequence[Row]) -> None:
    lowest, highest = math.inf, -math.inf
    for name, colour in zip(panel.metrics, COLOURS, strict=False):
        steps, values = _points(rows, panel.phase, name)
        if steps:
            _draw_curve(axes, steps, values, label=name, colour=colour)
            lowest, highest = min(lowest, *values), max(highest, *values)
    if panel.is_wide:
        _draw_evaluations(axes, rows=rows)
    if panel.is_share:
        axes.set_ylim(min(-0.02, lowest), None if axes.get_ylim()[1] > 1.05 else 1.02)
    if panel.is_log and 0 < 10 * lowest < highest:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(panel.title)
    axes.set_xlabel("update" if panel.phase in ("warm_start", "sft") else "step")
    axes.legend(loc="best")


def _draw_curve(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, label: str, colour: str
) -> None:
    """The raw values faintly, and their running mean on top where there are enough of them."""
    window = len(steps) // 20 | 1
    if window == 1:
        axes.plot(
            steps,
            values,
            color=colour,
            linewidth=1.4,
            label=label,
            marker="o" if len(steps) < 20 else "",
            markersize=3,
        )
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(
        steps,
        _running_mean(values, window=window),
        color=colour,
        linewidth=1.7,
        label=f"{label}, mean of {window}",
    )


def _running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the ``window`` values (an odd number) around each, of fewer at both ends."""
    half = window // 2
    around = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in around]


def _draw_evaluations(axes: Axes, *, rows: Sequence[Row]) -> None:
    for name, colour, marker, above in zip(
        EVALUATIONS, COLOURS[1:], "DsP", (9, -15, 9), strict=True
    ):
        steps, values = _points(rows, "eval", name)
        if not steps:
            continue
        label = f"held out, {name.split('/')[1]}"
        axes.plot(
            steps,
            values,
            linestyle="--",
            linewidth=0.9,
            color=colour,
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
                xytext=(0, above),
                ha="center",
                fontsize=8,
                color=colour,
            )
