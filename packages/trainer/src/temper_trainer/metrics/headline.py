"""The result of a run in one sentence, from its metrics."""

import math
from collections.abc import Mapping, Sequence

from temper_trainer.metrics.evaluation_report import (
    MAIN_METRICS,
    EvaluationRow,
    list_evaluations,
)
from temper_trainer.metrics.run_files import WARM_START_PHASE, Row

_METRICS = ("reward/mean", "preference/accuracy", "sft/nll", "actor/loss")
"""Metrics to summarize a run without evaluations, in order of preference."""
NORM = "actor/grad_norm"
_MAX_STEPS = 10
"""Number of steps over which the first and the last values are averaged."""


def describe_result(rows: Sequence[Row]) -> str:
    """Return the first and the last result of a run, and their difference.

    Evaluations come first; without them, the mean reward, the accuracy on pairs or the loss of the
    first and last steps. A run whose gradients were all 0 has not learned, and the result says so.

    Example:
        >>> rows = [
        ...     Row(step=step, phase="eval", time_s=0.0, values={"eval/greedy/reward": reward})
        ...     for step, reward in ((0, 0.552), (220, 0.932))
        ... ]
        >>> describe_result(rows)
        'greedy 0.552 -> 0.932 (+0.380)'
    """
    evaluations = [
        each
        for each in list_evaluations(rows)
        if not each.category and math.isfinite(each.main_value)
    ]
    result = _describe_evaluations(evaluations) or _describe_steps(rows)
    norms = [row.values[NORM] for row in rows if NORM in row.values]
    if norms and not any(norms):
        result += f"{', but ' if result else ''}the gradient was 0 in every step"
    return result


def _describe_evaluations(evaluations: Sequence[EvaluationRow]) -> str:
    series: dict[str, list[float]] = {}
    for each in sorted(evaluations, key=lambda each: each.step):
        metric = MAIN_METRICS[each.kind]
        kind = each.kind if metric == "reward" else f"held-out {metric}"
        series.setdefault(f"{each.set_name} {kind}".strip(), []).append(each.main_value)
    return ", ".join(
        _describe_change(name, values[0], values[-1] if len(values) > 1 else None)
        for name, values in series.items()
    )


def _describe_steps(rows: Sequence[Row]) -> str:
    steps = sorted(
        (row for row in rows if row.phase not in (WARM_START_PHASE, "eval")),
        key=lambda row: row.step,
    )
    for name in _METRICS:
        values = [
            row.values[name] for row in steps if math.isfinite(row.values.get(name, math.nan))
        ]
        if len(values) > 1:
            count = min(_MAX_STEPS, len(values) // 2)
            first, last = (sum(part) / count for part in (values[:count], values[-count:]))
            return _describe_change(name, first, last)
    return ""


def _describe_change(name: str, first: float, last: float | None) -> str:
    if last is None:
        return f"{name} {first:.3f}"
    return f"{name} {first:.3f} -> {last:.3f} ({last - first:+.3f})"


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units.

    Example:
        >>> [format_duration(s) for s in (0.25, 42, 253, 7384, 180_000)]
        ['0.25 s', '42 s', '4 min 13 s', '2 h 3 min', '2 d 2 h']
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest, parts = round(seconds), list[str]()
    for unit, size in units:
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def format_reward(parts: Mapping[str, float]) -> str:
    """Return the weighted sum of a reward's parts as text.

    Example:
        >>> format_reward({"exact_match": 1.0, "math_verify": 0.5})
        'exact_match + 0.5 * math_verify'
    """
    return " + ".join(
        name if weight == 1 else f"{weight:g} * {name}" for name, weight in parts.items()
    )
