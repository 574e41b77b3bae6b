"""Scoring by a reward model, which reads tokens: those of the prompt and everything after it, as the policy saw them."""

import math
from collections.abc import Sequence
from typing import Protocol

from temper_trainer.reward.outcome import FailureKind, Item, Outcome


class ScoresTokens(Protocol):
    """A reward model, wherever it runs."""

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The score of each token sequence, in order."""
        ...


def model_outcomes(
    model: ScoresTokens, items: Sequence[Item], *, tokens: Sequence[Sequence[int]]
) -> list[Outcome]:
    """One outcome per item, in order; a score that is no finite number is a failure."""
    found = []
    for (prompt, _), score in zip(items, model.scores(tokens), strict=True):
        if math.isfinite(score):
            found.append(Outcome(reward=score))
        else:
            message = f"the reward model gave {score} (prompt {prompt.prompt_id}, {prompt.source})"
            found.append(Outcome(kind=FailureKind.NOT_FINITE, message=message))
    return found
