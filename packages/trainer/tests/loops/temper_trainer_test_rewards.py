"""Reward functions, and an environment, that the tests of the loops name by import path."""

import multiprocessing
import os
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.types import Prompt


def share_of_digits(prompt: Prompt, completion: str) -> float:
    """Share of characters that are digits: a reward that an untrained model already varies in."""
    del prompt
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def fails_on_even(prompt: Prompt, completion: str) -> float:
    """Raise for every second prompt."""
    if prompt.prompt_id % 2 == 0:
        raise ValueError("even prompts cannot be scored")
    return share_of_digits(prompt, completion)


def always_fails(prompt: Prompt, completion: str) -> float:
    """Raise for every completion."""
    raise ValueError("nothing can be scored")


def waits(prompt: Prompt, completion: str) -> float:
    """Wait long enough to be interrupted, and signal the start by a file."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    time.sleep(0.01)
    return share_of_digits(prompt, completion)


def starts_what_hangs(prompt: Prompt, completion: str) -> float:
    """Wait for a process in another thread, which the interpreter would join at its exit."""
    del prompt, completion

    def run() -> None:
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        with open(os.environ["TEMPER_TEST_MARKER"], "a") as file:
            file.write(f"{process.pid}\n")
        while True:
            process.join()

    with ThreadPoolExecutor() as pool:
        pool.submit(run)
    return 0.0


def often_equal(prompt: Prompt, completion: str) -> float:
    """Return 1 for all completions of two prompts in three; the others vary."""
    return 1.0 if prompt.prompt_id % 3 else share_of_digits(prompt, completion)


def always_one(prompt: Prompt, completion: str) -> float:
    """Return 1, so that no group has a learning signal."""
    del prompt, completion
    return 1.0


def breaks_down(prompt: Prompt, completion: str) -> float:
    """Fail after 32 calls until a file next to the marker exists."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    if os.path.getsize(marker) > 32 and not os.path.exists(f"{marker}.mended"):
        raise ConnectionError("the service is gone")
    return share_of_digits(prompt, completion)


def slow_after_two_steps(prompt: Prompt, completion: str) -> float:
    """Wait for each completion after the first 32: a second, or TEMPER_TEST_WAIT_S seconds."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    if os.path.getsize(marker) > 32:
        time.sleep(float(os.environ.get("TEMPER_TEST_WAIT_S", "1")))
    return share_of_digits(prompt, completion)


def blocks_interpreter_after_one_step(prompt: Prompt, completion: str) -> float:
    """Hold the GIL without end from the 17th completion on, in a call that checks no signals."""
    with open(os.environ["TEMPER_TEST_MARKER"], "a") as file:
        file.write("x")
    if os.path.getsize(os.environ["TEMPER_TEST_MARKER"]) > 16:
        sum(iter(int, 1))
    return share_of_digits(prompt, completion)


def fails_with_its_key(prompt: Prompt, completion: str, *, judge: str, api_key: str) -> float:
    """Raise errors that quote a judge's secrets: for some of the first 16 calls, then for all."""
    marker = os.environ["TEMPER_TEST_MARKER"]
    with open(marker, "a") as file:
        file.write("x")
    if os.path.getsize(marker) <= 16 and len(completion) % 2:
        return share_of_digits(prompt, completion)
    try:
        raise PermissionError(f"https://judge?{quote(api_key, safe='')}")
    except PermissionError as error:
        basic = b64encode(f"me:{api_key}".encode()).decode()
        raise RuntimeError(f"401 for {judge!r} with key {api_key}, Basic {basic}") from error


class Fee:
    """Every rollout ends after its first completion, and has the fee added to its reward."""

    def __init__(self, *, config: EnvironmentConfig, tokenizer: object, fee: float) -> None:
        del config, tokenizer
        self._fee = fee

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, tokens: Sequence[int]) -> Observation:
        return Observation(is_done=True, reward=self._fee, metrics={"fee/steps": 1.0})


def judged(prompt: Prompt, completion: str, *, api_key: str) -> float:
    """Score with a judge that needs a key."""
    assert api_key
    return share_of_digits(prompt, completion)


def hangs_on_request(prompt: Prompt, completion: str) -> float:
    """Hang once, if the file that TEMPER_TEST_HANG names exists."""
    marker = os.environ["TEMPER_TEST_HANG"]
    if os.path.exists(marker):
        os.unlink(marker)
        time.sleep(3600)
    return share_of_digits(prompt, completion)
