"""The learning rates of Megatron's own scheduler, which the old Megatron workers stepped once a call."""

import math
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ScheduleSpec

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMegatronSchedule:
    """A pure function of completed scheduler steps, as ``megatron.core.optimizer_param_scheduler`` has it; defaults of the old YAML."""

    lr: float
    lr_warmup_init: float = 0.0
    """Rate of the first warm-up step."""
    lr_warmup_steps: int = -1
    """Steps of linear rise; 0 and less take the ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """Fraction of the decay's steps."""
    lr_decay_steps: int | None = None
    """End of the decay; None is total_training_steps."""
    total_training_steps: int = -1
    """Steps of the run."""
    lr_decay_style: str = "constant"
    """constant, linear, cosine or inverse-square-root."""
    min_lr: float = 0.0
    """Floor of the decay."""

    def __post_init__(self) -> None:
        if self.lr_decay_style not in _STYLES:
            raise ConfigError(f"optim.lr_decay_style is {self.lr_decay_style!r}, but must be one of {', '.join(_STYLES)}.")
        if self.lr_decay_style in ("linear", "cosine") and self.end <= self.warmup:
            raise ConfigError(
                f"optim.lr_decay_style is {self.lr_decay_style}, which ends after {self.end} steps and begins after {self.warmup}: set "
                "optim.lr_decay_steps or optim.total_training_steps."
            )

    @property
    def end(self) -> int:
        """Steps until the decay ends."""
        return self.total_training_steps if self.lr_decay_steps is None else self.lr_decay_steps

    @property
    def warmup(self) -> int:
        """Steps of linear rise."""
        if self.lr_warmup_steps > 0:
            return self.lr_warmup_steps
        return max(0, int(self.lr_warmup_steps_ratio * self.end))

    def rate(self, step: int) -> float:
        """Return the rate of the updates after ``step`` scheduler steps."""
        if self.warmup > 0 and step <= self.warmup:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * step / self.warmup
        if self.lr_decay_style == "constant":
            return self.lr
        if step > self.end:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        progress = (step - self.warmup) / (self.end - self.warmup)
        fraction = 1.0 - progress if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
        return self.min_lr + fraction * (self.lr - self.min_lr)

    def as_spec(self) -> ScheduleSpec:
        """Return Temper's own schedule of the same shape.

        Raises:
            ConfigError: it has none.
        """
        if self.lr_warmup_init or self.lr_decay_style == "inverse-square-root":
            raise ConfigError(
                f"optim has lr_warmup_init {self.lr_warmup_init} and lr_decay_style {self.lr_decay_style}, which numerics temper lacks: "
                "use a rise from 0 to a constant, linear or cosine rate, or numerics legacy."
            )
        if self.lr_decay_style == "constant":
            return ScheduleSpec(warmup_steps=self.warmup, advance="rl_step")
        return ScheduleSpec(
            kind="linear" if self.lr_decay_style == "linear" else "cosine",
            warmup_steps=self.warmup,
            total_steps=self.end,
            min_lr_ratio=self.min_lr / self.lr,
            advance="rl_step",
        )
