"""Reward functions by name or by import path."""

import difflib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from temper_engine_api.errors import ConfigError
from temper_trainer.config.import_path import import_object, is_import_path
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig
from temper_trainer.reward.builtin_rewards import (
    exact_match,
    gsm8k_flexible,
    gsm8k_strict,
    math_verify,
)
from temper_trainer.types import Prompt

Argument = str | int | float | bool | None


class RewardFunction(Protocol):
    """Scores one completion; what it raises or returns besides a finite number is a counted failure."""

    def __call__(self, prompt: Prompt, completion_text: str, /, **arguments: Argument) -> float:
        """The reward of a completion, decoded without special tokens."""
        ...


_REGISTERED: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "gsm8k_flexible": gsm8k_flexible,
    "gsm8k_strict": gsm8k_strict,
    "math_verify": math_verify,
}

Function = TypeVar("Function", bound=Callable[..., float])


def register_reward(name: str) -> Callable[[Function], Function]:
    """Decorator that makes a function known as ``reward.function: name``.

    With reward.num_workers above 0 the function must be importable, because the workers import it.

    Raises:
        ConfigError: the name is taken by another function.
    """

    def register(function: Function) -> Function:
        if name == REWARD_MODEL:
            raise ConfigError(f"{name!r} means the score of reward.model: choose another name.")
        if _REGISTERED.setdefault(name, function) is not function:
            raise ConfigError(
                f"there already is a reward named {name!r} ({_REGISTERED[name].__module__}): choose another name."
            )
        return function

    return register


def split_components(config: RewardConfig) -> list[RewardConfig]:
    """One configuration for each reward function of a run: that of ``function``, or those of ``components``, which take no arguments."""
    if not config.components:
        return [config]
    return [replace(config, function=name, arguments={}) for name in config.components]


def resolve_reward(config: RewardConfig) -> RewardFunction:
    """The function that ``config.function`` names, its arguments checked against its signature.

    Raises:
        ConfigError: no such name, module or function, an extra is missing, or the function does not take these arguments.
    """
    by_path = (
        import_object(config.function, key="reward.function")
        if is_import_path(config.function)
        else None
    )
    function: Callable[..., float] | None = by_path or _REGISTERED.get(config.function)
    if function is None:
        near = difflib.get_close_matches(config.function, _REGISTERED, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"reward.function is {config.function!r}, which is no registered reward: {hint}"
            f"Registered are {', '.join(sorted(_REGISTERED))}; your own goes by import path, package.module:function."
        )
    if function is math_verify and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "the reward math_verify needs the math-verify library: pip install 'temper-trainer[math]'."
        )
    try:
        inspect.signature(function).bind(None, "", **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward.function {config.function} can't be called with a prompt, a text and reward.arguments "
            f"{dict(config.arguments)}: {error}."
        ) from error
    return function
