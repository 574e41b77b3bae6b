"""Reward functions by registered name or import path."""

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


def split_components(config: RewardConfig) -> list[RewardConfig]:
    """Return one configuration per reward function: of ``function``, or of each component.

    Components take no arguments.
    """
    if not config.components:
        return [config]
    return [replace(config, function=name, arguments={}) for name in config.components]


def resolve_reward(config: RewardConfig) -> RewardFunction:
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
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"reward.function is {config.function!r}, which is not a registered reward: {hint}Use "
            f"one of {', '.join(sorted(_REGISTERED))}, or the import path of a custom one, "
            "package.module:function."
        )
    if function is math_verify and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "the reward math_verify needs the math-verify library: pip install "
            "'temper-trainer[math]'."
        )
    try:
        # Only binds the arguments, so that a wrong name is found before the first step.
        inspect.signature(function).bind(None, "", **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward.function {config.function} cannot be called with a prompt, a text and "
            f"reward.arguments {dict(config.arguments)}: {error}."
        ) from error
    return function
