"""Learning-rate schedules as pure functions of a step counter."""

import math

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ScheduleSpec


def compute_learning_rate(step: int, *, peak: float, spec: ScheduleSpec) -> float:
    """Compute the learning rate of the update after `step` completed steps.

    During the warmup it is peak * (step + 1) / warmup_steps, so it is above 0 for the first update.
    After the warmup it is constant, or decays linearly or as a cosine until total_steps, and stays
    at peak * min_lr_ratio from there on. With wsd it is constant until decay_steps before
    total_steps, and then decays linearly.

    Args:
        step: Number of completed steps, at least 0.
        peak: Peak learning rate.
        spec: Schedule.

    Raises:
        ConfigError: If total_steps is 0, a placeholder for the length of a run.

    Example:
        >>> spec = ScheduleSpec(kind="linear", warmup_steps=2, total_steps=6)
        >>> [compute_learning_rate(step, peak=1.0, spec=spec) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if spec.total_steps == 0:
        raise ConfigError(
            "schedule.total_steps is 0, which stands for the length of a run and is filled in by a "
            "trainer: set the number of steps."
        )
    warmup = spec.num_warmup_steps
    # step + 1, because an update with learning rate 0 would change nothing.
    if step < warmup:
        return peak * (step + 1) / warmup
    if spec.kind == "constant":
        return peak
    assert spec.total_steps is not None
    begin = warmup if spec.decay_steps is None else spec.total_steps - spec.decay_steps
    progress = min(1.0, max(0.0, (step - begin) / (spec.total_steps - begin)))
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if spec.kind == "cosine" else 1.0 - progress
    return peak * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * fall)
