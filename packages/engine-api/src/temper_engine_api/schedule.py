"""Learning-rate schedules: their settings, and the rate as a function of a step counter.

Does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.settings_check import check_field_types


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Learning-rate schedule; see `compute_learning_rate`.

    Example:
        >>> ScheduleSpec(kind="cosine", warmup_ratio=0.05, total_steps=200).num_warmup_steps
        10
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warmup. wsd (warmup, stable, decay) stays at the peak and decays linearly in
    the last `decay_steps`."""
    warmup_steps: int = 0
    """Steps of linear warmup; the first one has lr / warmup_steps, not 0."""
    warmup_ratio: float = 0.0
    """Warmup as a fraction of total_steps, rounded up; set only one of the two."""
    total_steps: int | None = None
    """Steps until min_lr_ratio is reached, including warmup; required by linear, cosine, wsd and
    warmup_ratio. 0 means the length of the run, which the trainer fills in."""
    decay_steps: int | None = None
    """Decay steps at the end of wsd, required there and refused by other kinds; Hu et al. 2024,
    arXiv:2404.06395."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak."""
    advance: Literal["update", "rl_step"] = "update"
    """Unit of a step: an optimizer update, or an RL step of several updates."""

    @property
    def num_warmup_steps(self) -> int:
        """Number of warmup steps, from warmup_steps or warmup_ratio."""
        if self.total_steps is None or not self.warmup_ratio:
            return self.warmup_steps
        # In floating point 0.07 * 100 is slightly more than 7, which would round up to 8.
        return math.ceil(round(self.warmup_ratio * self.total_steps, 9))

    def __post_init__(self) -> None:
        check_field_types(self, prefix="schedule.")
        if self.warmup_steps < 0:
            raise ConfigError(
                f"schedule.warmup_steps is {self.warmup_steps}, but must be at least 0."
            )
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(
                f"schedule.warmup_ratio is {self.warmup_ratio}, but must be in [0, 1): it is a "
                "fraction of schedule.total_steps."
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                "schedule.warmup_steps and schedule.warmup_ratio both set the length of the "
                "warmup: remove one of them."
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(
                f"schedule.min_lr_ratio is {self.min_lr_ratio}, but must be in [0, 1]: it is a "
                "fraction of the peak."
            )
        self._check_length()

    def _check_length(self) -> None:
        needs_total = self.kind != "constant" or self.warmup_ratio > 0
        if needs_total and self.total_steps is None:
            cause = (
                f"schedule.kind is {self.kind}"
                if self.kind != "constant"
                else f"schedule.warmup_ratio is {self.warmup_ratio}"
            )
            raise ConfigError(
                f"{cause}, which needs schedule.total_steps: the length of the schedule."
            )
        if not needs_total and self.total_steps is not None:
            raise ConfigError(
                "schedule.total_steps has no effect with schedule.kind constant: remove it."
            )
        if self.kind == "constant" and self.min_lr_ratio != 0.0:
            raise ConfigError(
                "schedule.min_lr_ratio has no effect with schedule.kind constant: remove it."
            )
        if (self.kind == "wsd") != (self.decay_steps is not None):
            raise ConfigError(
                f"schedule.decay_steps is {self.decay_steps} and schedule.kind {self.kind}: wsd "
                "needs the number of its decay steps, and no other kind has any."
            )
        if not self.total_steps:
            return
        decay, warmup = self.decay_steps or 0, self.num_warmup_steps
        if (
            decay < 0
            or self.total_steps <= warmup
            or self.total_steps < warmup + decay
            or (self.kind == "wsd" and decay < 1)
        ):
            raise ConfigError(
                f"schedule.total_steps ({self.total_steps}) must exceed the warmup ({warmup} steps)"
                + (
                    f" and leave schedule.decay_steps ({decay}), at least 1, after it."
                    if self.kind == "wsd"
                    else "."
                )
            )


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
        ConfigError: If total_steps is 0, a placeholder for a run's length.

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
