"""Plot the evaluations of a run with confidence intervals, for its report."""

import io
import math
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from temper_trainer.metrics.curves import COLORS, STYLE
from temper_trainer.metrics.evaluation_report import (
    AT_K,
    INTERVAL,
    MAIN_METRICS,
    EvaluationRow,
)


def draw_evaluations(evaluations: Sequence[EvaluationRow]) -> bytes | None:
    """Return a PNG that shows evaluations over steps, and the last step by category.

    Bars are 95 % confidence intervals. Returns None without evaluations.
    """
    if not any(math.isfinite(each.main_value) for each in evaluations):
        return None
    last_step = max(each.step for each in evaluations)
    last = [each for each in evaluations if each.step == last_step]
    has_steps = len({each.step for each in evaluations}) > 1
    with mpl.rc_context(STYLE):
        height = max(3.0, 0.32 * len(last) * len(_list_plotted_metrics(last)) + 1.2)
        figure = Figure(figsize=(11.2, height), layout="constrained")
        FigureCanvasAgg(figure)  # not pyplot, as in draw_curves
        axes = figure.subplots(1, 2 if has_steps else 1, squeeze=False)[0]
        if has_steps:
            _draw_over_steps(axes[0], evaluations)
        _draw_last(axes[-1], last)
        axes[-1].set_title(f"after step {last_step}")
        picture = io.BytesIO()
        figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()


def _list_plotted_metrics(evaluations: Sequence[EvaluationRow]) -> list[str]:
    """Return the metrics to plot: the main one, and pass@k and maj@k with the largest k."""
    largest: dict[str, int] = {}
    for each in evaluations:
        for name in each.values:
            if match := AT_K.fullmatch(name):
                largest[match[1]] = max(largest.get(match[1], 0), int(match[2]))
    main = dict.fromkeys(MAIN_METRICS[each.kind] for each in evaluations)
    return [*main, *(f"{name}_at_{k}" for name, k in largest.items())]


def _draw_over_steps(axes: Axes, evaluations: Sequence[EvaluationRow]) -> None:
    full_sets = [each for each in evaluations if not each.category]
    series: dict[tuple[str, str], list[EvaluationRow]] = {}
    for each in full_sets:
        series.setdefault((each.set_name, each.kind), []).append(each)
    for i, rows in enumerate(series.values()):
        for name, style in zip(_list_plotted_metrics(rows), ("-", "--", ":"), strict=False):
            points = sorted(
                (each.step, each.values[name], each.values.get(name + INTERVAL, 0.0))
                for each in rows
                if math.isfinite(each.values.get(name, math.nan))
            )
            axes.errorbar(
                [step for step, _, _ in points],
                [value for _, value, _ in points],
                yerr=[interval for _, _, interval in points],
                color=COLORS[i % len(COLORS)],
                linestyle=style,
                linewidth=1.2,
                marker="o",
                markersize=3,
                capsize=2,
                label=rows[0].format_label(name),
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("evaluations, 95 % intervals")
    axes.set_xlabel("step")
    axes.legend(loc="best")


def _draw_last(axes: Axes, evaluations: Sequence[EvaluationRow]) -> None:
    bars = [
        (each.format_label(name), each, name, color)
        for each in evaluations
        for name, color in zip(_list_plotted_metrics(evaluations), COLORS, strict=False)
        if math.isfinite(each.values.get(name, math.nan))
    ]
    positions = range(len(bars))
    axes.barh(
        positions,
        [each.values[name] for _, each, name, _ in bars],
        xerr=[each.values.get(name + INTERVAL, 0.0) for _, each, name, _ in bars],
        color=[color for _, _, _, color in bars],
        alpha=0.75,
        capsize=2,
    )
    axes.set_yticks(positions, [label for label, _, _, _ in bars])
    axes.invert_yaxis()  # in the order of the table, from the top
