"""An OpenEnv server with the package's own classes: ``python openenv_server_for_tests.py PORT``."""

import socket
import string
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Text(Action):
    """Text of the policy."""

    text: str


class Question(Observation):
    """Text for the policy."""

    text: str


class Digits(Environment[Text, Question, State]):
    """Rewards digits in a text; an episode has two steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Question:
        """Ask for the first text; the question depends on the seed."""
        self._state = State(episode_id=episode_id, step_count=0)
        return Question(text=f"{seed}+1")

    def step(self, action: Text, timeout_s: float | None = None, **kwargs: Any) -> Question:
        """Return the fraction of digits as the reward."""
        self._state.step_count += 1
        reward = sum(each in string.digits for each in action.text) / max(1, len(action.text))
        return Question(text="2", reward=reward, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        """Number of steps."""
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Digits, Text, Question, max_concurrent_envs=64)
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
