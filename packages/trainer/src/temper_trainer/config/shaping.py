"""What happens to a score before it is a reward: the penalty of long completions, scale, bounds, normalisation."""

from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """DAPO's soft penalty: nothing up to sampling.max_tokens - buffer_tokens, then linear down to -penalty at sampling.max_tokens."""

    buffer_tokens: int
    """Tokens over which the penalty grows."""
    penalty: float = 1.0
    """At the longest completion."""

    def __post_init__(self) -> None:
        check_range("reward.shaping.overlong.buffer_tokens", self.buffer_tokens, at_least=1)
        check_range("reward.shaping.overlong.penalty", self.penalty, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingConfig:
    """In this order: scale, overlong penalty, bounds, normalisation."""

    scale: float = 1.0
    """Factor of every score."""
    overlong: OverlongConfig | None = None
    """Penalty of long completions; None is none."""
    low: float | None = None
    """Rewards below are raised to it; None leaves them."""
    high: float | None = None
    """Rewards above are lowered to it; None leaves them."""
    normalization: Literal["none", "step", "running"] = "none"
    """step: mean 0 and deviation 1 over the step; running: over all rewards of the run so far; saved in checkpoints."""

    def __post_init__(self) -> None:
        check_range("reward.shaping.scale", self.scale)
        check_range("reward.shaping.low", self.low)
        check_range("reward.shaping.high", self.high)
        if self.scale == 0:
            raise ConfigError(
                "reward.shaping.scale is 0, with which every score would be the same: set it to another number."
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(
                f"reward.shaping.low is {self.low} and high is {self.high}: the first must be below the second."
            )
