"""Settings of the reward: functions, reward model and shaping."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
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


REWARD_MODEL = "reward_model"
"""In reward.function, or among reward.components, the score of reward.model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a score head, such as task rm writes."""

    engine: EngineConfig
    """Model, precision and layout; model_type is reward_model, and the optimiser is never built."""
    num_workers: int = 1
    """Processes; more than 1 needs the ray runtime."""
    pool: str = "train"
    """Resource pool; it shares the devices of those in it."""

    def __post_init__(self) -> None:
        check_range("num_workers", self.num_workers, at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How a completion is scored."""

    function: str = "gsm8k_strict"
    """A registered name (gsm8k_strict, gsm8k_flexible, math_verify, exact_match), an import path ``package.module:function``, or
    ``reward_model`` for the score of reward.model."""
    arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Keyword arguments of the function."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Several rewards, by name or import path, each with its weight, in place of function; the reward is their weighted sum."""
    model: RewardModelConfig | None = None
    """The reward model that is asked where function or a component is ``reward_model``."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """From score to reward."""
    timeout_s: float = 10.0
    """Longest time of one call; a later answer counts as timed out."""
    num_workers: int = 0
    """Processes that score, killed where a call takes longer than timeout_s. 0 scores in a thread of the driver: one that hangs is
    abandoned, but while a call holds the interpreter (a runaway regular expression) the whole run waits for its end."""
    max_failure_fraction: float = 0.1
    """Share of failed rewards (raised, timed out, not finite) in a step above which the run stops; below it they are left out."""

    def __post_init__(self) -> None:
        check_range("reward.timeout_s", self.timeout_s, above=0)
        for name, weight in self.components.items():
            check_range(f"reward.components.{name}", weight)
        check_range("reward.num_workers", self.num_workers, at_least=0)
        check_range("reward.max_failure_fraction", self.max_failure_fraction, at_least=0, at_most=1)
