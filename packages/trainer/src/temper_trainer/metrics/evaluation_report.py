"""Read the evaluations of a run from its metrics, and tabulate them for its report."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

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
AT_K = re.compile(r"(pass|maj)_at_(\d+)")
"""Matches metrics such as ``pass_at_8``."""


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
        matches = filter(None, map(AT_K.fullmatch, self.values))
        return max((int(match[2]) for match in matches), default=1)

    def format_label(self, metric: str) -> str:
        """Return the label of a value in plots, such as ``math500 sampled mean@4``."""
        is_mean = metric == "reward" and self.num_completions > 1
        title = f"mean@{self.num_completions}" if is_mean else AT_K.sub(r"\1@\2", metric)
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
    """Return the table's column titles and lines; a mean and its interval share a cell.

    The column of categories is left out if no evaluation has one.
    """
    has_categories = any(each.category for each in evaluations)
    metrics = list(dict.fromkeys(name for each in evaluations for name in each.values))
    metrics = [name for name in metrics if not name.endswith(INTERVAL)]
    lines = []
    for each in evaluations:
        cells = [_format_cell(each.values, name) for name in metrics]
        category = (each.category,) if has_categories else ()
        lines.append((each.step, each.set_name or "data.eval", each.kind, *category, *cells))
    titles = [AT_K.sub(r"\1@\2", name) for name in metrics]
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
