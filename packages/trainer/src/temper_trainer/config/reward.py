"""Settings of the reward: functions, components, reward model and shaping."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """DAPO's soft penalty on long completions.

    It is 0 up to sampling.max_tokens - buffer_tokens, then falls linearly to -penalty at
    sampling.max_tokens.
    """

    buffer_tokens: int
    """Tokens over which the penalty grows."""
    penalty: float = 1.0
    """Penalty at the maximum length, above 0."""

    def __post_init__(self) -> None:
        check_range("reward.shaping.overlong.buffer_tokens", self.buffer_tokens, at_least=1)
        check_range("reward.shaping.overlong.penalty", self.penalty, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingConfig:
    """Steps from a score to a reward, in order: scale, overlong penalty, bounds, normalization."""

    scale: float = 1.0
    """Factor on every score; not 0."""
    overlong: OverlongConfig | None = None
    """Penalty on long completions; None is off."""
    low: float | None = None
    """Lower bound of the reward; None is unbounded."""
    high: float | None = None
    """Upper bound of the reward; None is unbounded."""
    normalization: Literal["none", "step", "running"] = "none"
    """Normalize to mean 0 and standard deviation 1. step: over the step's rewards; running: over
    all rewards of the run so far, saved in checkpoints.
    """

    def __post_init__(self) -> None:
        check_range("reward.shaping.scale", self.scale)
        check_range("reward.shaping.low", self.low)
        check_range("reward.shaping.high", self.high)
        if self.scale == 0:
            raise ConfigError(
                "reward.shaping.scale is 0, which would make all scores equal: set it to another "
                "number."
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(
                f"reward.shaping.low is {self.low} and high is {self.high}: the first must be "
                "smaller than the second."
            )


REWARD_MODEL = "reward_model"
"""Name in reward.function and reward.components that stands for the score of reward.model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a score head, such as task rm trains."""

    engine: EngineConfig
    """Model, precision and layout. model_type must be reward_model; no optimizer is built."""
    num_workers: int = 1
    """Number of processes; more than 1 needs runtime.kind=ray."""
    pool: str = "train"
    """ray only: resource pool; it shares the pool's devices with the other roles in it."""

    def __post_init__(self) -> None:
        check_range("num_workers", self.num_workers, at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Scoring of completions."""

    function: str = "gsm8k_strict"
    """Registered name (gsm8k_strict, gsm8k_flexible, math_verify, exact_match), import path
    ``package.module:function``, or ``reward_model`` for the score of reward.model.
    """
    arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Keyword arguments of the function."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Weights of several rewards, by name or import path; replaces function. The reward is their
    weighted sum.
    """
    model: RewardModelConfig | None = None
    """Reward model; used if function or a component is ``reward_model``."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    timeout_s: float = 10.0
    """Maximum time in seconds of one call; slower calls count as failed."""
    num_workers: int = 0
    """Worker processes for scoring; a worker is killed if a call exceeds timeout_s. 0 scores in a
    thread of the driver, where a call that never releases the GIL (such as a runaway regular
    expression) blocks the run.
    """
    max_failure_fraction: float = 0.1
    """Stop the run if more than this fraction of a step's rewards failed (raised, timed out, not
    finite), in [0, 1]. Otherwise the failed ones are dropped.
    """

    def __post_init__(self) -> None:
        check_range("reward.timeout_s", self.timeout_s, above=0)
        for name, weight in self.components.items():
            check_range(f"reward.components.{name}", weight)
        check_range("reward.num_workers", self.num_workers, at_least=0)
        check_range("reward.max_failure_fraction", self.max_failure_fraction, at_least=0, at_most=1)


def find_reward_model_conflicts(
    reward: RewardConfig, *, loop: str, is_ray: bool, generates_completions: bool
) -> Iterator[str]:
    """Yield the conflicts between the reward model, the rewards that use it, and the runtime."""
    model = reward.model
    is_used = REWARD_MODEL in (reward.components or (reward.function,))
    if model is None:
        if is_used and generates_completions:
            key = "reward.components" if reward.components else "reward.function"
            yield (
                f"{key} names {REWARD_MODEL}, but reward.model is not set: set "
                "reward.model.engine.model={path: ..., model_type: reward_model}."
            )
        return
    engine = model.engine
    if not is_used:
        yield (
            "reward.model is set, but neither reward.function nor reward.components names "
            f"{REWARD_MODEL}: name it, or remove the model."
        )
    if engine.model.model_type != "reward_model":
        yield (
            f"reward.model.engine.model.model_type is {engine.model.model_type}: set it to "
            "reward_model."
        )
    if engine.model.path is None:
        yield (
            "reward.model.engine.model.path is not set, but a reward model must be trained: train "
            "one with task=rm."
        )
    if engine.lora.is_enabled:
        yield (
            "reward.model.engine.lora is set, but a reward model is frozen: merge the adapter "
            "into its model and remove it."
        )
    if model.num_workers % engine.replica_size:
        yield (
            f"reward.model.num_workers is {model.num_workers}, but the layout of "
            f"reward.model.engine shards one copy of the model over {engine.replica_size} ranks: "
            f"set it to a multiple of {engine.replica_size}."
        )
    if not is_ray and model.num_workers > 1:
        yield (
            f"reward.model.num_workers is {model.num_workers}, but runtime.kind is inline, which "
            "runs one process: use ray."
        )
    if not is_ray and loop != "sync":
        yield (
            f"reward.model is set and loop is {loop}, which scores while the actor trains, but "
            "runtime.kind is inline, which runs both in one process: set runtime.kind=ray or "
            "loop=sync."
        )
