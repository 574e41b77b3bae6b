"""What became of one call of a reward function."""

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
    """Why there is no reward."""

    RAISED = "raised"
    """The function raised, or the process that ran it died."""
    TIMEOUT = "timeout"
    """It took longer than reward.timeout_s."""
    NOT_FINITE = "not_finite"
    """It returned NaN, infinity, or something that is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, or why there is none."""

    reward: float | None = None
    """Finite."""
    kind: FailureKind | None = None
    """Set where there is no reward."""
    message: str = ""
    """One line about the failure."""
    trace: str = ""
    """The traceback, where the function raised."""

    def as_score(self) -> Score:
        """What the loop sees."""
        return Score(
            reward=self.reward,
            failure=None if self.kind is None else f"{self.kind}: {self.message}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A reward function with its arguments: picklable where the function can be imported."""

    function: RewardFunction
    """What scores."""
    arguments: Mapping[str, Argument]
    """Its keyword arguments."""

    def __call__(self, item: Item) -> Outcome:
        """Score one completion; nothing that the function does, short of hanging, gets out of here as an exception."""
        prompt, text = item
        try:
            value: object = self.function(prompt, text, **self.arguments)
        except Exception as error:  # noqa: BLE001  the function is the user's: whatever it raises is counted and shown
            return Outcome(
                kind=FailureKind.RAISED,
                message=f"{type(error).__name__}: {error} (prompt {prompt.prompt_id}, {prompt.source})",
                trace=traceback.format_exc(),
            )
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            message = (
                f"returned {value!r:.80} ({type(value).__name__}), but a reward is a finite number"
            )
            message += f" (prompt {prompt.prompt_id}, {prompt.source})"
            return Outcome(kind=FailureKind.NOT_FINITE, message=message)
        return Outcome(reward=float(value))


def timeout_outcome(item: Item, *, timeout_s: float) -> Outcome:
    """Of a call that was given up."""
    return Outcome(
        kind=FailureKind.TIMEOUT,
        message=f"took longer than reward.timeout_s = {timeout_s} (prompt {item[0].prompt_id}, {item[0].source})",
    )
