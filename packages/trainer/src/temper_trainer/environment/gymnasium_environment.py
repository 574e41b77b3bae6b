"""Environments of Gymnasium: the policy writes actions as text. Needs the extra ``gymnasium``."""

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.text_environment import TextEnvironment, TextObservation
from temper_trainer.environment.tool_calls import parse_json
from temper_trainer.types import Prompt

_threads = DaemonThreads("gymnasium")


class GymnasiumEnvironment(TextEnvironment):
    """One `gymnasium.Env`. The observation after its reset follows the prompt.

    An action of a `Text` space is the text of the completion, without spaces at its ends. Actions
    of other spaces are written as JSON, such as ``2`` or ``[0.5, 1.0]``. If an action is not in the
    space, the answer is an error message, and the environment makes no step.
    """

    def __init__(
        self,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        id: str,
        **arguments: str | float | bool | None,
    ) -> None:
        """Create the environment of one rollout.

        Args:
            config: Settings of the run's environment.
            tokenizer: Tokenizer of the policy.
            id: Id of a registered environment, or ``package.module:Id`` to import its module first.
            arguments: Further arguments of `gymnasium.make`.

        Raises:
            ConfigError: If there is no such environment.
        """
        super().__init__(config=config, tokenizer=tokenizer)
        try:
            self._environment: gymnasium.Env[Any, Any] = gymnasium.make(id, **arguments)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(
                f"environment.arguments.id is {id}, which gymnasium cannot make ({error}): give "
                "the id of a registered environment, or package.module:id."
            ) from error

    async def open(self, prompt: Prompt) -> str:
        """Reset the environment; all rollouts of a prompt have the same seed."""
        observation, _ = await self._call(
            lambda: self._environment.reset(seed=prompt.prompt_id, options=dict(prompt.extra))
        )
        return format_observation(observation)

    async def respond(self, text: str) -> TextObservation:
        """Take the action that the completion names."""
        try:
            action = parse_action(text, space=self._environment.action_space)
        except ValueError as error:
            return TextObservation(text=f"error: {error}", metrics={"environment/wrong_actions": 1})
        observation, reward, terminated, truncated, _ = await self._call(
            lambda: self._environment.step(action)
        )
        return TextObservation(
            text=format_observation(observation),
            reward=float(reward),
            is_done=bool(terminated or truncated),
            metrics={"environment/actions": 1.0},
        )

    async def close(self) -> None:
        """Close the environment."""
        await self._call(self._environment.close)

    async def _call(self, function: Callable[[], Any]) -> Any:
        # Call it in a thread, because a step may take long.
        return await _threads.call(function)


def parse_action(text: str, *, space: "gymnasium.Space[Any]") -> object:
    """Return the action that a text names.

    Raises:
        ValueError: If the text names no action of the space.
    """
    text = text.strip()
    message = f"{text!r} is not an action of {space}"
    try:
        action: object = text if isinstance(space, gymnasium.spaces.Text) else parse_json(text)
        if isinstance(space, gymnasium.spaces.Discrete) and type(action) is int:
            action = np.int64(action)
        elif isinstance(action, list) and space.shape is not None:
            action = np.asarray(action, dtype=space.dtype)
    # A number may be too large for the type of the space.
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(message) from error
    if not space.contains(action):
        raise ValueError(message)
    return action


def format_observation(observation: object) -> str:
    """Return an observation as text: a string unchanged, any other value as JSON."""
    return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _plain(value: object) -> object:
    """Convert a number or array of numpy to a value that JSON can write."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"an observation has a value of type {type(value).__name__}: return text")
