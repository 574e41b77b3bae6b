"""Reward functions by name or by import path."""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import RewardConfig
from temper_trainer.reward.exact_match import exact_match
from temper_trainer.reward.gsm8k import gsm8k_flexible, gsm8k_strict
from temper_trainer.reward.math_verify import math_verify
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
        if _REGISTERED.setdefault(name, function) is not function:
            raise ConfigError(f"there already is a reward named {name!r} ({_REGISTERED[name].__module__}): choose another name.")
        return function

    return register


def reward_parts(config: RewardConfig) -> list[RewardConfig]:
    """One configuration for each reward function of a run: that of ``function``, or those of ``components``, which take no arguments."""
    if not config.components:
        return [config]
    return [replace(config, function=name, arguments={}) for name in config.components]


def resolve_reward(config: RewardConfig) -> RewardFunction:
    """The function that ``config.function`` names, its arguments checked against its signature.

    Raises:
        ConfigError: no such name, module or function, an extra is missing, or the function does not take these arguments.
    """
    module, colon, name = config.function.partition(":")
    function = _import(module, name) if colon else _REGISTERED.get(config.function)
    if function is None:
        near = difflib.get_close_matches(config.function, _REGISTERED, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"reward.function is {config.function!r}, which is no registered reward: {hint}"
            f"Registered are {', '.join(sorted(_REGISTERED))}; your own goes by import path, package.module:function."
        )
    if function is math_verify and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the reward math_verify needs the math-verify library: pip install 'temper-trainer[math]'.")
    try:
        inspect.signature(function).bind(None, "", **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward.function {config.function} can't be called with a prompt, a text and reward.arguments "
            f"{dict(config.arguments)}: {error}."
        ) from error
    return function


def _import(module: str, name: str) -> Callable[..., float]:
    try:
        holder = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything while it is imported
        is_absent = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")
        advice = "put the folder that holds it on PYTHONPATH" if is_absent else "mend the module"
        raise ConfigError(
            f"reward.function names module {module!r}, which can't be imported ({type(error).__name__}: {error}): {advice}."
        ) from error
    members = vars(holder)
    found = members.get(name)
    if not callable(found):
        near = difflib.get_close_matches(name, [key for key, value in members.items() if callable(value)], n=1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"reward.function names {name!r} in {module}, which has no such function{hint}")
    function: Callable[..., float] = found
    return function
