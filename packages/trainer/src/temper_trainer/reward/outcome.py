"""The result of one call of a reward function."""

import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from temper_trainer.reward.registry import Argument, RewardFunction
from temper_trainer.types import Prompt, Score

Item = tuple[Prompt, str]
"""A prompt and the text of a completion."""


class FailureKind(StrEnum):
    """Reason why there is no reward."""

    RAISED = "raised"
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
    """Traceback, if the function raised."""

    def to_score(self) -> Score:
        """Return the score for the training loop."""
        return Score(
            reward=self.reward,
            failure=None if self.kind is None else f"{self.kind}: {self.message}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A reward function with its arguments; picklable if the function is importable."""

    function: RewardFunction
    arguments: Mapping[str, Argument]
    """Keyword arguments of the function."""

    def __call__(self, item: Item) -> Outcome:
        """Score one completion; whatever the function raises becomes a failed outcome."""
        prompt, text = item
        try:
            value: object = self.function(prompt, text, **self.arguments)
        # A user's function may raise anything; each failure is counted and shown.
        except Exception as error:  # noqa: BLE001
            return Outcome(
                kind=FailureKind.RAISED,
                message=(
                    f"{type(error).__name__}: {error} (prompt {prompt.prompt_id}, {prompt.source})"
                ),
                trace=traceback.format_exc(),
            )
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            message = (
                f"returned {value!r:.80} ({type(value).__name__}), but a reward is a finite number"
            )
            message += f" (prompt {prompt.prompt_id}, {prompt.source})"
            return Outcome(kind=FailureKind.NOT_FINITE, message=message)
        return Outcome(reward=float(value))


def make_timeout_outcome(item: Item, *, timeout_s: float) -> Outcome:
    """Return the outcome of a call that was abandoned."""
    return Outcome(
        kind=FailureKind.TIMEOUT,
        message=(
            f"took longer than reward.timeout_s = {timeout_s} (prompt {item[0].prompt_id}, "
            f"{item[0].source})"
        ),
    )
