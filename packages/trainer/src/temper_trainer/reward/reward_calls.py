"""Calls of reward functions: their outcomes, and how many of a round may run at a time.

`reward_threads` makes them in threads of the driver, `reward_processes` in worker processes.
"""

import logging
import math
import numbers
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.config.reward import Argument
from temper_trainer.progress import advance_progress
from temper_trainer.redaction import redact_secrets
from temper_trainer.reward.registry import RewardFunction
from temper_trainer.types import Prompt, Score

logger = logging.getLogger(__name__)

BLOCKED_AFTER_S = 3.0
"""Time after reward.timeout_s when a call that still runs must be one that holds the GIL."""

_MAX_REWARD = 3.4e38
"""Largest size of a reward, because advantages are float32."""

Item = tuple[Prompt, str]
"""A prompt and a completion's text."""


class FailureKind(StrEnum):
    """Reason why there is no reward."""

    EXCEPTION = "exception"
    """The function raised, or its process died."""
    TIMEOUT = "timeout"
    """The call took longer than reward.timeout_s."""
    NOT_FINITE = "not_finite"
    """The function returned NaN, infinity, or something other than a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, or the reason why there is none."""

    reward: float | None = None
    """Finite; None if the call failed."""
    kind: FailureKind | None = None
    """None if there is a reward."""
    message: str = ""
    """One line that describes the failure."""
    trace: str = ""
    """Traceback from the function on, if it raised; empty for errors of Temper, which explain
    themselves.
    """
    seconds: float = 0.0
    """Time that the call took."""
    num_retries: int = 0
    """Failed calls before this one."""
    usage: "JudgeUsage | None" = None
    """Requests of a judge; None for other rewards."""

    def redact(self) -> "Outcome":
        """Return this outcome with secret values hidden, because exceptions may quote them."""
        if self.kind is None:
            return self
        return replace(self, message=redact_secrets(self.message), trace=redact_secrets(self.trace))

    def to_score(self) -> Score:
        """Return the score for the training loop."""
        return Score(
            reward=self.reward,
            failure=None if self.kind is None else f"{self.kind}: {self.message}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeUsage:
    """Cost of one judge score."""

    requests: int = 0
    """HTTP requests, including retries."""
    calls: int = 0
    """1 if the completion was sent, 0 if its score was known."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float | None = None
    """Time until the answer, including retries; None without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A reward function with its arguments; picklable if the function is importable."""

    function: RewardFunction
    arguments: Mapping[str, Argument]
    """Keyword arguments for the function."""

    def __call__(self, item: Item) -> Outcome:
        """Score one completion; whatever the function raises becomes a failed outcome."""
        started = time.monotonic()
        outcome = self._score(item)
        return replace(outcome, seconds=time.monotonic() - started)

    def _score(self, item: Item) -> Outcome:
        prompt, text = item
        try:
            value: object = self.function(prompt, text, **self.arguments)
        # A user's function may raise anything, also SystemExit, which would end the thread without
        # a word; each failure is counted and shown. A KeyboardInterrupt is the function's own:
        # Ctrl-C reaches neither threads nor worker processes.
        except BaseException as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            return Outcome(
                kind=FailureKind.EXCEPTION,
                message=f"{reason} (prompt {prompt.prompt_id}, {prompt.location})",
                trace=_format_trace(error),
            )
        reward = math.nan
        if isinstance(value, numbers.Real):
            try:
                reward = float(value)
            except OverflowError:  # an integer beyond float64
                reward = math.inf
        if abs(reward) <= _MAX_REWARD:
            return Outcome(reward=reward)
        limit = "" if math.isnan(reward) else " of at most 3.4e38"
        message = (
            f"returned {value!r:.80} ({type(value).__name__}), but a reward is a finite number"
            f"{limit} (prompt {prompt.prompt_id}, {prompt.location})"
        )
        return Outcome(kind=FailureKind.NOT_FINITE, message=message)


def _format_trace(error: BaseException) -> str:
    if isinstance(error, TemperError) or error.__traceback__ is None:
        return ""
    # Without the frame of `_score`, which tells a user nothing.
    frames = error.__traceback__.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def make_timeout_outcome(item: Item, *, timeout_s: float) -> Outcome:
    """Return the outcome of a call that was abandoned."""
    prompt, _ = item
    return Outcome(
        kind=FailureKind.TIMEOUT,
        message=(
            f"took longer than reward.timeout_s = {timeout_s} (prompt {prompt.prompt_id}, "
            f"{prompt.location})"
        ),
    )


_MIN_TIMEOUTS_OF_SUSPICION = 2
"""Timeouts in a row after which more calls are made at once, although these are accepted."""
_MIN_TIMEOUTS_OF_HANG = 3
"""Timeouts in a row after which the function is taken to hang, however slow its results were."""


class CallRound:
    """One reward function's calls for a round of rollouts, and how many run at a time."""

    def __init__(self, *, num_items: int, max_failures: int, timeout_s: float) -> None:
        """Count calls for this many items; some may fail."""
        self.num_items = num_items
        self.num_called = 0
        """Number of known outcomes."""
        self._max_failures = max_failures
        self._timeout_s = timeout_s
        self._num_failures = 0
        self._num_timeouts = 0
        self._num_timeouts_in_row = 0
        self._slowest_s = 0.0

    def add(self, outcome: Outcome, *, item: Item) -> None:
        """Record a call's outcome; log the first timeout."""
        self.num_called += 1
        self._num_failures += outcome.kind is not None
        if outcome.kind == FailureKind.TIMEOUT:
            self._num_timeouts_in_row += 1
            self._num_timeouts += 1
            if self._num_timeouts == 1:
                self._report_timeout(item)
        else:
            self._num_timeouts_in_row = 0
            self._slowest_s = max(self._slowest_s, outcome.seconds)
        advance_progress("rewards")

    def choose_num_calls(self, usual: int) -> int:
        """Return how many calls may run at a time.

        That is the usual number until more calls fail than accepted, or two in a row time out. From
        then on it is the number of failures that would stop the run. So if the function hangs, the
        run stops after one more ``timeout_s`` and does not wait once per call. After a slow call
        that returned, it stops after two more.
        """
        is_accepted = self._num_failures * self.num_items <= self._max_failures * self.num_called
        if is_accepted and self._num_timeouts_in_row < _MIN_TIMEOUTS_OF_SUSPICION:
            return usual
        num_calls = self._max_failures + 1 - self._num_failures
        if self._slowest_s > 0 and self._num_timeouts_in_row < _MIN_TIMEOUTS_OF_HANG:
            # Calls that compute take turns on the cores: so many of them would all be too slow. Two
            # at once show whether the function still returns, or hangs since its last result.
            num_parallel = max(
                int(self._timeout_s / (4 * self._slowest_s)),
                2 if self._num_timeouts_in_row else 1,
            )
            num_calls = min(num_calls, num_parallel)
        return max(usual, num_calls)

    def _report_timeout(self, item: Item) -> None:
        prompt, _ = item
        logger.warning(
            "the reward of prompt %s (%s) took longer than reward.timeout_s = %g s, which counts "
            "as failed; %s of %s calls are done",
            prompt.prompt_id,
            prompt.location,
            self._timeout_s,
            self.num_called - 1,
            self.num_items,
        )


class PartScoring(Protocol):
    """Scores one part of the rewards, such as a function or a judge, for all rounds in a run."""

    async def score(self, item: Item, *, calls: CallRound, priority: tuple[int, int]) -> Outcome:
        """Score one completion; the smallest priority goes first. Failures become outcomes."""
        ...

    def close(self) -> None:
        """End threads, processes and connections."""
        ...


async def call_with_retries(call: Callable[[], Awaitable[Outcome]], *, max_retries: int) -> Outcome:
    """Make a call again while it raises or takes too long, up to this often."""
    outcome, num_retries = await call(), 0
    while num_retries < max_retries and outcome.kind in (
        FailureKind.EXCEPTION,
        FailureKind.TIMEOUT,
    ):
        outcome, num_retries = await call(), num_retries + 1
    return replace(outcome, num_retries=num_retries)
