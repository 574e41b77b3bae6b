"""Learning-rate schedules as pure functions of a counter: nothing to restore but the counter."""

import math

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ScheduleSpec


def compute_learning_rate(step: int, *, peak: float, spec: ScheduleSpec) -> float:
    """Rate of the update that follows ``step`` completed ones.

    Warm-up is linear and never zero: (step + 1) / warmup_steps of the peak. Then constant, or a linear or cosine fall that reaches
    min_lr_ratio at total_steps and stays there; wsd begins its linear fall only decay_steps before.

    Args:
        step: completed steps, >= 0.
        peak: the optimiser's rate.
        spec: the schedule.

    Raises:
        ConfigError: its length is still to be filled in.
    """
    if spec.total_steps == 0:
        raise ConfigError(
            "schedule.total_steps is 0, the length of a run, which only a trainer knows: give the number of steps."
        )
    warmup = spec.num_warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if spec.kind == "constant":
        return peak
    assert spec.total_steps is not None
    begin = warmup if spec.decay_steps is None else spec.total_steps - spec.decay_steps
    progress = min(1.0, max(0.0, (step - begin) / (spec.total_steps - begin)))
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if spec.kind == "cosine" else 1.0 - progress
    return peak * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * fall)
