"""Environments of OpenEnv, which run in a server. Needs the extra ``openenv``."""

import json
from collections.abc import Mapping
from typing import Any

from openenv.core.generic_client import GenericEnvClient
from transformers import PreTrainedTokenizerBase

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.text_environment import TextEnvironment, TextObservation
from temper_trainer.environment.tool_calls import parse_json
from temper_trainer.types import Prompt

_INVALID_ACTION = "(code: VALIDATION_ERROR)"
"""End of the client's message for an action that the server refuses; it has no other sign."""


class _Session(GenericEnvClient):
    """A client that connects once.

    OpenEnv's connects again by itself after a connection was lost, to a session that was not reset.
    The rest of the rollout would then be in another episode.
    """

    _first: object = None
    """The first connection; None before."""

    async def _connect_async(self) -> "_Session":
        await super()._connect_async()
        if self._first is None:
            self._first = self._ws
        elif self._ws is not self._first:
            raise ConnectionError(f"the connection to {self.base_url} was lost")
        return self


class OpenenvEnvironment(TextEnvironment):
    """One session of an OpenEnv server. The observation after its reset follows the prompt.

    An action is a JSON object with the fields of the environment's action, or the text of one of
    its fields. One that the server refuses gets its error message as the answer.
    """

    def __init__(
        self,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        url: str,
        action_field: str = "",
        observation_field: str = "",
    ) -> None:
        """Create the environment of one rollout; `open` connects to the server.

        Args:
            config: Settings of the run's environment.
            tokenizer: Tokenizer of the policy.
            url: Address of the server, such as ``http://127.0.0.1:8000``.
            action_field: Field of an action that is the text of a completion; if empty, completions
                are JSON objects.
            observation_field: Field of an observation that the policy reads; if empty, it reads all
                fields as JSON.
        """
        super().__init__(config=config, tokenizer=tokenizer)
        self._client = _Session(base_url=url)
        self._action_field = action_field
        self._observation_field = observation_field

    async def open(self, prompt: Prompt) -> str:
        """Begin an episode; all rollouts of a prompt have the same seed."""
        await self._client.connect()
        result = await self._client.reset(seed=prompt.prompt_id, **prompt.extra)
        return self._format(result.observation)

    async def respond(self, text: str) -> TextObservation:
        """Take the action that the completion describes."""
        try:
            action = self._parse_action(text)
        except ValueError as error:
            return _refuse_action(str(error))
        try:
            result = await self._client.step(action)
        # Other errors, also a ValueError about a damaged answer, are failures of the environment.
        except RuntimeError as error:
            if not str(error).endswith(_INVALID_ACTION):
                raise
            return _refuse_action(str(error).removesuffix(_INVALID_ACTION).strip())
        return TextObservation(
            text=self._format(result.observation),
            reward=float(result.reward or 0.0),
            is_done=result.done,
            metrics={"environment/actions": 1.0},
        )

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _parse_action(self, text: str) -> dict[str, Any]:
        if self._action_field:
            return {self._action_field: text.strip()}
        action = parse_json(text)
        if not isinstance(action, dict):
            raise ValueError(f"{text.strip()!r} is not a JSON object")
        return action

    def _format(self, observation: Mapping[str, Any]) -> str:
        if self._observation_field:
            return str(observation[self._observation_field])
        return json.dumps(observation)


def _refuse_action(reason: str) -> TextObservation:
    return TextObservation(text=f"error: {reason}", metrics={"environment/wrong_actions": 1.0})
