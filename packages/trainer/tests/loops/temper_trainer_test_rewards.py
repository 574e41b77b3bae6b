"""Reward functions, and an environment, that the tests of the loops name by import path."""

import os
import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.types import Prompt


def share_of_digits(prompt: Prompt, completion: str) -> float:
    """Share of characters that are digits: a reward that an untrained model already varies in."""
    del prompt
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def fails_on_even(prompt: Prompt, completion: str) -> float:
    """Raises for every second prompt."""
    if prompt.prompt_id % 2 == 0:
        raise ValueError("even prompts cannot be scored")
    return share_of_digits(prompt, completion)


def always_fails(prompt: Prompt, completion: str) -> float:
    """Raises for every completion."""
    raise ValueError("nothing can be scored")


def waits(prompt: Prompt, completion: str) -> float:
    """Slow enough to be interrupted; says that it began."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    time.sleep(0.01)
    return share_of_digits(prompt, completion)


def often_equal(prompt: Prompt, completion: str) -> float:
    """1 for every completion of two prompts in three; the rest varies."""
    return 1.0 if prompt.prompt_id % 3 else share_of_digits(prompt, completion)


def always_one(prompt: Prompt, completion: str) -> float:
    """Nothing to learn."""
    del prompt, completion
    return 1.0


def breaks_down(prompt: Prompt, completion: str) -> float:
    """Fails after 32 calls, until a file beside the marker says that it was mended."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    if os.path.getsize(marker) > 32 and not os.path.exists(f"{marker}.mended"):
        raise ConnectionError("the service is gone")
    return share_of_digits(prompt, completion)


def slow_after_two_steps(prompt: Prompt, completion: str) -> float:
    """Takes a second for each completion but the first 32."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    if os.path.getsize(marker) > 32:
        time.sleep(1)
    return share_of_digits(prompt, completion)


class Fee:
    """Every rollout ends after its first completion, and has the fee added to its reward."""

    def __init__(
        self, *, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, fee: float
    ) -> None:
        del config, tokenizer
        self._fee = fee

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, tokens: Sequence[int]) -> Observation:
        return Observation(is_done=True, reward=self._fee)


def judged(prompt: Prompt, completion: str, *, api_key: str) -> float:
    """A judge that needs a key."""
    assert api_key
    return share_of_digits(prompt, completion)


def hangs_when_told(prompt: Prompt, completion: str) -> float:
    """Hang once, if the file that TEMPER_TEST_HANG names exists."""
    marker = os.environ["TEMPER_TEST_HANG"]
    if os.path.exists(marker):
        os.unlink(marker)
        time.sleep(3600)
    return share_of_digits(prompt, completion)
