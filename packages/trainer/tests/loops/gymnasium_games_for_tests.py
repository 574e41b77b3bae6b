"""Environments with gymnasium's own classes; importing the module registers them."""

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CORRIDOR = "temper-tests/Corridor-v0"
DIGITS = "temper-tests/Digits-v0"


class Corridor(gymnasium.Env[np.ndarray[Any, Any], np.int64]):
    """A corridor of positions, on which the actions 0 and 1 walk to the left and right."""

    def __init__(self, length: int = 3) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, length, shape=(1,), dtype=np.int64)
        self._length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Start at a position that depends on the seed, except at the right end."""
        super().reset(seed=seed)
        self._position = int(self.np_random.integers(self._length))
        return np.array([self._position]), {}

    def step(
        self, action: np.int64
    ) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Walk; the right end gives 1 and ends the episode."""
        self._position = max(0, self._position + (1 if action == 1 else -1))
        is_over = self._position == self._length
        return np.array([self._position]), float(is_over), is_over, False, {}


class Digits(gymnasium.Env[str, str]):
    """Rewards digits in a text; an episode has two steps."""

    def __init__(self) -> None:
        self.action_space = spaces.Text(max_length=200, charset=string.printable)
        self.observation_space = spaces.Text(max_length=20, charset=string.printable)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Ask for the first text."""
        super().reset(seed=seed)
        self._num_steps = 0
        return "1+1", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the fraction of digits as the reward."""
        self._num_steps += 1
        reward = sum(each in string.digits for each in action) / max(1, len(action))
        return "2", reward, self._num_steps == 2, False, {}


gymnasium.register(id=CORRIDOR, entry_point=Corridor)
gymnasium.register(id=DIGITS, entry_point=Digits)
