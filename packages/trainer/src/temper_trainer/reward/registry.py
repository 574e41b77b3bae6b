"""Reward functions by registered name or import path, and the names that data selects."""

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.config.data import DataConfig
from temper_trainer.config.reward import REWARD_MODEL, Argument, RewardConfig, RewardFunctionConfig
from temper_trainer.reward.builtin_rewards import (
    exact_match,
    gsm8k_flexible,
    gsm8k_strict,
    math_verify,
)
from temper_trainer.reward.judge_endpoint import check_judge
from temper_trainer.settings.names import import_object, is_import_path
from temper_trainer.types import Prompt


class RewardFunction(Protocol):
    """Scores one completion; exceptions and non-finite results count as failures."""

    def __call__(self, prompt: Prompt, completion_text: str, /, **arguments: Argument) -> float:
        """Return the reward of a completion, given as text without special tokens."""
        ...


_REGISTERED: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "gsm8k_flexible": gsm8k_flexible,
    "gsm8k_strict": gsm8k_strict,
    "math_verify": math_verify,
}

Function = TypeVar("Function", bound=Callable[..., float])


def register_reward(name: str) -> Callable[[Function], Function]:
    """Register a function under a name for ``reward.function``.

    With reward.num_workers above 0 the function must be importable, because the workers import it.

    Raises:
        ConfigError: If the name is already registered.
    """

    def register(function: Function) -> Function:
        if name == REWARD_MODEL:
            raise ConfigError(
                f"{name!r} is reserved for the score of reward.model: choose another name."
            )
        if _REGISTERED.setdefault(name, function) is not function:
            raise ConfigError(
                f"there is already a reward named {name!r} ({_REGISTERED[name].__module__}): "
                "choose another name."
            )
        return function

    return register


def list_registered_names() -> list[str]:
    """Return the names of all registered functions."""
    return list(_REGISTERED)


def get_function_config(config: RewardConfig, name: str) -> RewardFunctionConfig:
    """Return function and arguments of a reward by its name.

    The name is a key of reward.functions, a registered name or an import path. The function named
    by reward.function has the arguments in reward.arguments.
    """
    if name in config.functions:
        return config.functions[name]
    is_main = name == config.function and not config.components
    return RewardFunctionConfig(function=name, arguments=config.arguments if is_main else {})


def find_rewards(config: RewardConfig, names: Iterable[str]) -> list[str]:
    """Return the names of all parts in some rewards, each once; "" is the main reward."""
    return list(dict.fromkeys(part for name in names for part in config.get_parts(name)))


def check_rewards(config: RewardConfig, names: Iterable[str]) -> None:
    """Check that every part of some rewards can be scored.

    Raises:
        ConfigError: If a function is wrong (see `resolve_reward`), a judge lacks its library or
            key, or a definition has the name of a registered function.
    """
    for name in config.defined_names:
        if name in _REGISTERED:
            raise ConfigError(
                f"reward.functions, judges or sums has the name {name}, which is a registered "
                "reward: choose another name."
            )
    for name in find_rewards(config, names):
        if name in config.judges:
            check_judge(config.judges[name], name=name)
        elif name != REWARD_MODEL:
            resolve_reward(get_function_config(config, name))


def resolve_reward(config: RewardConfig | RewardFunctionConfig) -> RewardFunction:
    """Return the function that ``config.function`` names, after checking its arguments.

    Raises:
        ConfigError: If the name, module, function or an extra does not exist, or the arguments do
            not fit.
    """
    imported = (
        import_object(config.function, key="reward.function")
        if is_import_path(config.function)
        else None
    )
    function: Callable[..., float] | None = imported or _REGISTERED.get(config.function)
    if function is None:
        near = difflib.get_close_matches(config.function, _REGISTERED, n=1)
        hint = f"did you mean {near[0]!r}? Use" if near else "use"
        module, dot, name = config.function.rpartition(".")
        if dot:
            hint = f"an import path has a colon, {module}:{name}. Use"
        raise ConfigError(
            f"reward.function is {config.function!r}, which is not a registered reward: {hint} "
            f"one of {', '.join(sorted(_REGISTERED))}, the import path of a custom one, "
            "package.module:function, or a name in reward.functions or reward.judges."
        )
    if function is math_verify and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "the reward math_verify needs the math-verify library: run "
            f"{format_install('temper-trainer[math]')}."
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward.function {config.function} is an async function, but must return a number: "
            "write def instead of async def. Temper runs such calls at the same time."
        )
    try:
        # Bind the arguments without a call, so that a wrong name is found before the first step.
        inspect.signature(function).bind(None, "", **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward.function {config.function} cannot be called with a prompt, a text and "
            f"reward.arguments {dict(config.arguments)}: {error}."
        ) from error
    return function


def find_unknown_rewards(config: RewardConfig, rewards: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a sentence for each row that selects an unknown reward.

    An import path comes from its source, which is checked with the configuration.

    Args:
        config: The run's reward configuration.
        rewards: Location and selected reward per row.
    """
    known = {"", *config.defined_names, *list_registered_names()}
    if config.model is not None:
        known.add(REWARD_MODEL)
    for location, reward in rewards:
        if reward not in known and not is_import_path(reward):
            yield (
                f"{location}: the row's reward is {reward!r}, which is not a reward: correct the "
                f"row, or define it. There are {', '.join(sorted(known - {''}))}."
            )


def iterate_selected_rewards(data: DataConfig, reward: RewardConfig) -> Iterator[str]:
    """Yield the configured reward names. Rows of data may select others."""
    yield ""
    for source in (*data.train_sources.values(), *data.eval_sources.values()):
        if source.reward is not None:
            yield source.reward
        if source.reward_key is not None:
            yield from reward.defined_names
