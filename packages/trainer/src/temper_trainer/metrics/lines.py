"""The one line of a step: the few numbers that tell most."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """A metric that belongs on the line."""

    metric: str
    """Its name."""
    label: str
    """What the line calls it."""
    show: Callable[[float], str]
    """How it is written."""


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def _rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


TELLING = (
    Telling(metric="eval/greedy/reward", label="greedy", show=_digits(3)),
    Telling(metric="eval/sampled/reward", label="sampled", show=_digits(3)),
    Telling(metric="reward/mean", label="reward", show=_digits(3)),
    Telling(metric="actor/loss", label="loss", show=_digits(4)),
    Telling(metric="critic/loss", label="value loss", show=_digits(4)),
    Telling(metric="actor/grad_norm", label="grad", show=_digits(3)),
    Telling(metric="policy/ratio_mean", label="ratio", show=_digits(4)),
    Telling(metric="policy/ref_kl", label="kl", show=_digits(4)),
    Telling(metric="rollout/length_mean", label="length", show=_digits(1)),
    Telling(metric="rollout/tokens_per_s", label="tokens/s", show=_rate),
    Telling(metric="time/step_s", label="s", show=_digits(2)),
)
"""In the order of the line."""


def step_line(step: int, metrics: Mapping[str, float], *, phase: str, total: int | None) -> str:
    """For example ``rl 12/220  reward 0.453  loss 0.0123  grad 1.231  ratio 1.0000  tokens/s 5.1k  s 1.20``.

    Args:
        step: of the phase.
        metrics: what was logged; those that are not in TELLING stay in the files.
        phase: first word of the line.
        total: steps of the phase, where known.
    """
    place = f"{step}" if total is None else f"{step:>{len(str(total))}}/{total}"
    told = [
        f"{item.label} {shown(item, metrics[item.metric])}"
        for item in TELLING
        if item.metric in metrics
    ]
    return "  ".join([f"{phase} {place}", *told])


def shown(item: Telling, value: float) -> str:
    """A value as the line writes it."""
    return item.show(value) if math.isfinite(value) else str(value)
