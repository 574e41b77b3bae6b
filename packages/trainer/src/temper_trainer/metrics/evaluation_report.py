"""Show the evaluations of a run in its report: a table, and a plot with confidence intervals."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from temper_trainer.metrics.curves import COLORS, STYLE
from temper_trainer.metrics.run_files import Row

MAIN_METRICS = {
    "greedy": "reward",
    "eval": "reward",
    "sampled": "reward",
    "preference": "accuracy",
    "sft": "nll",
}
"""The plotted metric, by the kind of evaluation in metric names: a sampling
configuration, or preference or sft in supervised tasks. No held-out set is called like a kind.
"""
INTERVAL = "_ci95"
"""Name suffix for metrics with half a confidence interval's width."""
_AT_K = re.compile(r"(pass|maj)_at_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """The metrics of one set and category, with one sampling configuration, after one step."""

    step: int
    set_name: str
    """Empty for ``data.eval``."""
    kind: str
    """A key of `MAIN_METRICS`."""
    category: str
    """Empty for the full set."""
    values: dict[str, float]
    """Value by the last part of the metric's name, such as ``reward``."""

    @property
    def main_value(self) -> float:
        """The value to plot; NaN if there is none."""
        return self.values.get(MAIN_METRICS[self.kind], math.nan)

    @property
    def num_completions(self) -> int:
        """Number of completions per problem: the largest k of metrics such as mean@k, or 1."""
        matches = filter(None, map(_AT_K.fullmatch, self.values))
        return max((int(match[2]) for match in matches), default=1)

    def format_label(self, metric: str) -> str:
        """Return the label of a value in plots, such as ``math500 sampled mean@4``."""
        is_mean = metric == "reward" and self.num_completions > 1
        title = f"mean@{self.num_completions}" if is_mean else _AT_K.sub(r"\1@\2", metric)
        return " ".join(filter(None, (self.set_name, self.kind, self.category, title)))


def list_evaluations(rows: Sequence[Row]) -> list[EvaluationRow]:
    """Return the evaluations of a run by step, each full set before its categories."""
    values: dict[tuple[int, str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.phase != "eval":
            continue
        for name, value in row.values.items():
            head, *parts, metric = name.split("/")
            # Other metrics of the phase, such as eval/dropped, have no kind.
            if head != "eval" or not any(part in MAIN_METRICS for part in parts[:2]):
                continue
            # A set cannot have the name of a kind of evaluation. A category can.
            set_name = "" if parts[0] in MAIN_METRICS else parts.pop(0)
            kind, category = parts[0], "/".join(parts[1:])
            values.setdefault((row.step, set_name, kind, category), {})[metric] = value
    return [
        EvaluationRow(step=step, set_name=set_name, kind=kind, category=category, values=each)
        for (step, set_name, kind, category), each in values.items()
    ]


def tabulate_evaluations(
    evaluations: Sequence[EvaluationRow],
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return the table's heading and lines; a mean with an interval is one cell.

    The column of categories is left out if there are none.
    """
    has_categories = any(each.category for each in evaluations)
    metrics = list(dict.fromkeys(name for each in evaluations for name in each.values))
    metrics = [name for name in metrics if not name.endswith(INTERVAL)]
    lines = []
    for each in evaluations:
        cells = [_format_cell(each.values, name) for name in metrics]
        category = (each.category,) if has_categories else ()
        lines.append((each.step, each.set_name or "data.eval", each.kind, *category, *cells))
    titles = [_AT_K.sub(r"\1@\2", name) for name in metrics]
    if any(each.num_completions > 1 for each in evaluations):
        titles = ["reward (mean@k)" if title == "reward" else title for title in titles]
    category_title = ("category",) if has_categories else ()
    return ("after step", "set", "kind", *category_title, *titles), lines


def _format_cell(values: dict[str, float], name: str) -> str:
    if name not in values:
        return ""
    if name == "failed":
        return f"{values[name]:.0f}"
    interval = values.get(name + INTERVAL)
    return f"{values[name]:.3f}" + ("" if interval is None else f" ± {interval:.3f}")


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
            if match := _AT_K.fullmatch(name):
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
