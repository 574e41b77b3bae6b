"""Learning-rate schedules as pure functions of a counter: nothing to restore but the counter."""

import math

from temper_engine_api.specs import ScheduleSpec


def learning_rate(step: int, *, peak: float, spec: ScheduleSpec) -> float:
    """Rate of the update that follows ``step`` completed ones.

    Warm-up is linear and never zero: (step + 1) / warmup_steps of the peak. Then constant, or a linear or cosine fall that reaches
    min_lr_ratio at total_steps and stays there.

    Args:
        step: completed steps, >= 0.
        peak: the optimiser's rate.
        spec: the schedule.
    """
    if step < spec.warmup_steps:
        return peak * (step + 1) / spec.warmup_steps
    if spec.kind == "constant":
        return peak
    assert spec.total_steps is not None
    progress = min(1.0, (step - spec.warmup_steps) / (spec.total_steps - spec.warmup_steps))
    fall = 1.0 - progress if spec.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * fall)
