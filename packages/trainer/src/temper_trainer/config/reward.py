"""Settings of the reward: functions, components, judges, reward model and shaping."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataSource
from temper_trainer.config.judge import JudgeConfig
from temper_trainer.config.run import RoleConfig, find_layout_conflicts, find_model_conflicts
from temper_trainer.settings.ranges import (
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitFloat,
    check_order,
    check_range,
)
from temper_trainer.settings.variants import settings


@settings
class OverlongConfig:
    """DAPO's soft penalty on long completions.

    It is 0 up to sampling.max_tokens - buffer_tokens, then falls linearly to -penalty at
    sampling.max_tokens.
    """

    buffer_tokens: PositiveInt
    """Tokens over which the penalty grows."""
    penalty: PositiveFloat = 1.0
    """Penalty at the maximum length."""


@settings
class ShapingConfig:
    """Steps from a score to a reward, in order: scale, overlong penalty, bounds, normalization."""

    scale: FiniteFloat = 1.0
    """Factor on every score; not 0."""
    overlong: OverlongConfig | None = None
    """Penalty on long completions; None is off."""
    low: FiniteFloat | None = None
    """Lower bound of the reward; None is unbounded."""
    high: FiniteFloat | None = None
    """Upper bound of the reward; None is unbounded."""
    normalization: Literal["none", "step", "running"] = "none"
    """Normalize to mean 0 and standard deviation 1. step: over the step's rewards; running: over
    all rewards of the run so far, saved in checkpoints.
    """

    def __post_init__(self) -> None:
        if self.scale == 0:
            raise ConfigError(
                "reward.shaping.scale is 0, which would make all scores equal: set it to another "
                "number."
            )
        check_order("reward.shaping.low", self.low, "high", self.high)


REWARD_MODEL = "reward_model"
"""Name of the reward that is the score of reward.model."""

Argument = str | int | float | bool | None
"""Value of a reward function's argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunctionConfig:
    """A reward function with its arguments."""

    function: str
    """Registered name or import path, as in reward.function."""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    """Keyword arguments of the function."""


@settings
class RewardConfig:
    """Scoring of completions."""

    function: str = "gsm8k_strict"
    """Registered name (gsm8k_strict, gsm8k_flexible, math_verify, exact_match), import path
    ``package.module:function``, name in reward.functions or reward.judges, or ``reward_model`` for
    the score of reward.model.
    """
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    """Keyword arguments of the function."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Weights of several rewards, named as in reward.function; replaces function. The reward is
    their weighted sum.
    """
    functions: Mapping[str, RewardFunctionConfig] = field(default_factory=dict)
    """Functions with their own arguments. reward.function, reward.components, reward.sums and the
    data sources select one by its name here.
    """
    judges: Mapping[str, JudgeConfig] = field(default_factory=dict)
    """Language models that score completions, selected by name like reward.functions."""
    sums: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weighted sums of rewards, as in reward.components. A data source selects one by its name."""
    model: RoleConfig | None = None
    """Frozen model with a score head, for example one that a run with ``task=rm`` has trained. It
    is used if a reward is named ``reward_model``. Its model_type must be reward_model; no optimizer
    is built.
    """
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    timeout_s: PositiveFloat = 10.0
    """Maximum time in seconds of one call; slower calls count as failed."""
    num_workers: NonNegativeInt = 0
    """Worker processes for scoring; a worker is killed if a call exceeds timeout_s. 0 uses threads
    of the driver, where a call that never releases the GIL, such as a runaway regular expression,
    ends the run.
    """
    num_threads: PositiveInt | None = None
    """Number of threads that call a function at the same time if num_workers is 0. None uses up to
    8 for a function that mostly waits, for example for a web service, and that returns within a
    third of timeout_s; any other function gets one thread. Set it to 1 if the function must not run
    in two threads at once.
    """
    max_retries: NonNegativeInt = 0
    """Number of times that a call is repeated if it raises or takes longer than timeout_s."""
    max_failure_fraction: UnitFloat = 0.1
    """Stop the run if more than this fraction of a step's rewards failed (raised, timed out, not
    finite), in [0, 1]. Otherwise the failed ones are dropped.
    """

    def __post_init__(self) -> None:
        self._check_names()
        sums = {f"reward.sums.{name}": weights for name, weights in self.sums.items()}
        for key, weights in {"reward.components": self.components, **sums}.items():
            if not weights and key != "reward.components":
                raise ConfigError(f"{key} is empty: list rewards with their weights.")
            for name, weight in weights.items():
                check_range(f"{key}.{name}", weight, Range())
                if name in self.sums:
                    raise ConfigError(
                        f"{key} names {name}, which is a sum itself: list its parts, with their "
                        "weights multiplied."
                    )

    @property
    def defined_names(self) -> list[str]:
        """Names of reward.functions, reward.judges and reward.sums."""
        return [*self.functions, *self.judges, *self.sums]

    def get_parts(self, name: str = "") -> Mapping[str, float]:
        """Return the weights of a reward's parts by name.

        A reward that is not a sum has one part, itself, with weight 1.

        Args:
            name: Name of a reward; empty for that of reward.function or reward.components.

        Example:
            >>> RewardConfig(components={"math_verify": 1.0, "exact_match": 0.5}).get_parts()
            {'math_verify': 1.0, 'exact_match': 0.5}
            >>> RewardConfig().get_parts()
            {'gsm8k_strict': 1.0}
        """
        if not name:
            return self.components or {self.function: 1.0}
        return self.sums.get(name, {name: 1.0})

    def is_sum(self, name: str = "") -> bool:
        """Return True if a reward has weighted parts; an empty name is the main reward."""
        return name in self.sums or (not name and bool(self.components))

    def _check_names(self) -> None:
        names = self.defined_names
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name) or name == REWARD_MODEL:
                raise ConfigError(
                    f"reward.functions, judges or sums has the name {name!r}: use letters, digits "
                    f"and . _ -, and not {REWARD_MODEL}."
                )
            if names.count(name) > 1:
                raise ConfigError(
                    f"the name {name!r} is in two of reward.functions, reward.judges and "
                    "reward.sums: rename one."
                )
        if self.function in self.sums:
            raise ConfigError(
                f"reward.function is {self.function}, a sum: use reward.components for its parts."
            )
        for name, each in self.functions.items():
            if each.function in (REWARD_MODEL, *names):
                raise ConfigError(
                    f"reward.functions.{name}.function is {each.function}, but must be a "
                    "registered name or an import path."
                )


def find_reward_conflicts(
    reward: RewardConfig,
    *,
    sources: Mapping[str, DataSource],
    loop: str,
    is_ray: bool,
    generates_completions: bool,
) -> Iterator[str]:
    """Yield definitions that nothing uses, and conflicts of the reward model.

    Args:
        reward: Settings of the reward.
        sources: The data sources by key.
        loop: Value of loop.
        is_ray: True if runtime.kind is ray.
        generates_completions: True if the task scores completions.
    """
    rewards_by_source = {
        f"{key}.reward": each.reward for key, each in sources.items() if each.reward is not None
    }
    has_reward_key = any(source.reward_key is not None for source in sources.values())
    rewards_by_setting: dict[str, Collection[str]] = {
        "reward.components" if reward.components else "reward.function": reward.get_parts(),
        **{f"reward.sums.{name}": parts for name, parts in reward.sums.items()},
        **{key: (name,) for key, name in rewards_by_source.items()},
    }
    settings_with_model = [
        key for key, parts in rewards_by_setting.items() if REWARD_MODEL in parts
    ]
    if reward.model is not None:
        yield from _find_reward_model_conflicts(
            reward.model,
            is_used=has_reward_key or bool(settings_with_model),
            loop=loop,
            is_ray=is_ray,
        )
    elif settings_with_model and generates_completions:
        yield (
            f"{settings_with_model[0]} names {REWARD_MODEL}, but reward.model is not set: set "
            "reward.model.engine.model={path: ..., model_type: reward_model}."
        )
    if has_reward_key or not generates_completions:
        return
    selected = ("", *rewards_by_source.values())
    used = {*selected, *(part for name in selected for part in reward.get_parts(name))}
    kinds = {"functions": reward.functions, "judges": reward.judges, "sums": reward.sums}
    for kind, names in kinds.items():
        for name in names:
            # Parts of an unused sum are not reported: whoever uses the sum uses them, too.
            if name not in used and not any(name in parts for parts in reward.sums.values()):
                yield (
                    f"reward.{kind}.{name} is set, but no reward or data source names {name}: "
                    "name it in reward.function, reward.components or the source's reward, or "
                    "remove it."
                )


def find_component_conflicts(
    reward: RewardConfig, *, estimator: str, train_sources: Mapping[str, DataSource]
) -> Iterator[str]:
    """Yield settings that contradict an estimator that normalizes several rewards separately."""
    if not reward.components:
        yield (
            f"reward.components is empty with algorithm.advantage {estimator}, which normalizes "
            "several rewards separately: list the rewards there."
        )
    if reward.shaping != ShapingConfig():
        yield (
            f"reward.shaping has no effect with algorithm.advantage {estimator}, which uses the "
            "unshaped rewards: remove it."
        )
    for key, source in train_sources.items():
        if source.reward is not None or source.reward_key is not None:
            yield (
                f"{key} has reward or reward_key, but algorithm.advantage {estimator} needs the "
                "same reward.components for all completions: remove it."
            )


def _find_reward_model_conflicts(
    model: RoleConfig, *, is_used: bool, loop: str, is_ray: bool
) -> Iterator[str]:
    """Yield the conflicts between the reward model, the keys that name it, and the runtime."""
    if not is_used:
        yield (
            "reward.model is set, but neither reward.function nor reward.components names "
            f"{REWARD_MODEL}: name it, or remove the model."
        )
    yield from find_model_conflicts(
        "reward.model", model.engine, model_type=REWARD_MODEL, is_frozen=True
    )
    yield from find_layout_conflicts(
        "reward.model", model.engine, num_workers=model.num_workers, is_ray=is_ray
    )
    if model.engine.model.path is None:
        yield (
            "reward.model.engine.model.path is not set, but a reward model must be trained: train "
            "one with task=rm."
        )
    if not is_ray and loop != "sync":
        yield (
            f"loop {loop} scores rollouts with reward.model while the actor trains, but "
            "runtime.kind inline runs both models in one process: set runtime.kind=ray or "
            "loop=sync."
        )
