"""Score completions with functions and reward models, and stop after too many failures."""

import math
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig
from temper_trainer.progress import track_progress
from temper_trainer.reward.outcome import FailureKind, Item, Outcome, RewardCall
from temper_trainer.reward.process_scoring import ProcessScoring
from temper_trainer.reward.registry import resolve_reward, split_components
from temper_trainer.reward.thread_scoring import ThreadScoring
from temper_trainer.types import Score


class RewardModel(Protocol):
    """A reward model, wherever it runs."""

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each token sequence, in order."""
        ...


class RewardFailureError(TemperError, RuntimeError):
    """So many reward calls failed that training on the others would be misleading."""


class _Scoring(Protocol):
    def run(self, items: Sequence[Item]) -> list[Outcome]: ...

    def close(self) -> None: ...


class Scorer:
    """Scores completions as configured; a context manager, because it may start processes."""

    def __init__(self, config: RewardConfig, *, model: RewardModel | None = None) -> None:
        """Resolve the functions; processes start on entering the context.

        Args:
            config: Reward configuration of the run.
            model: The reward model, if a component of the reward is its score.

        Raises:
            ConfigError: See resolve_reward.
        """
        self._config = config
        self._model = model
        self._calls = [
            None
            if each.function == REWARD_MODEL
            else RewardCall(function=resolve_reward(each), arguments=dict(each.arguments))
            for each in split_components(config)
        ]
        self._weights = list(config.components.values())
        self._scorings: list[_Scoring | None] = []
        self._failures: Counter[FailureKind] = Counter()

    def __enter__(self) -> "Scorer":
        config = self._config
        for call in self._calls:
            if call is None:
                self._scorings.append(None)
            elif config.num_workers:
                self._scorings.append(
                    ProcessScoring(call, timeout_s=config.timeout_s, num_workers=config.num_workers)
                )
            else:
                self._scorings.append(ThreadScoring(call, timeout_s=config.timeout_s))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for scoring in self._scorings:
            if scoring is not None:
                scoring.close()
        self._scorings = []

    def score(
        self, items: Sequence[Item], *, tokens: Sequence[Sequence[int]] | None = None
    ) -> list[Score]:
        """Return one score per (prompt, completion text), in order.

        Args:
            items: Prompts and texts, for functions.
            tokens: Tokens of prompt and completion of each item; required with a reward model.

        Raises:
            RewardFailureError: If a larger fraction failed than reward.max_failure_fraction.
        """
        assert self._scorings, "a Scorer can only score inside its `with` block"
        with track_progress("rewards", total=len(items) * len(self._scorings)):
            by_part = [
                self._score_with_model(items, tokens) if scoring is None else scoring.run(items)
                for scoring in self._scorings
            ]
        # An item with several failed components counts once, with its first failure.
        outcomes = [
            next((each for each in of_item if each.kind is not None), of_item[0])
            for of_item in zip(*by_part, strict=True)
        ]
        failed = [outcome for outcome in outcomes if outcome.kind is not None]
        self._failures = Counter(outcome.kind for outcome in failed if outcome.kind is not None)
        if len(failed) > self._config.max_failure_fraction * len(items):
            counts = ", ".join(f"{count} {kind}" for kind, count in self._failures.items())
            raise RewardFailureError(
                f"{len(failed)} of {len(items)} calls of {self._name} failed ({counts}), more "
                f"than reward.max_failure_fraction = {self._config.max_failure_fraction}. The "
                f"first: {failed[0].kind}: {failed[0].message}\n{failed[0].trace}"
            )
        scores = [outcome.to_score() for outcome in outcomes]
        if not self._weights:
            return scores
        return [
            self._weighted_score(score, of_item)
            for score, of_item in zip(scores, zip(*by_part, strict=True), strict=True)
        ]

    def _score_with_model(
        self, items: Sequence[Item], tokens: Sequence[Sequence[int]] | None
    ) -> list[Outcome]:
        assert self._model is not None, (
            "a validated configuration that names a reward model has one"
        )
        assert tokens is not None
        return score_with_model(self._model, items, tokens=tokens)

    @property
    def _name(self) -> str:
        parts = self._config.components
        return (
            f"reward.components {', '.join(parts)}"
            if parts
            else f"reward.function {self._config.function}"
        )

    def _weighted_score(self, score: Score, outcomes: Sequence[Outcome]) -> Score:
        """Return the weighted sum of an item's rewards, if none of them failed."""
        if score.reward is None:
            return score
        parts = [
            reward for outcome in outcomes if (reward := outcome.to_score().reward) is not None
        ]
        return Score(
            reward=sum(w * each for w, each in zip(self._weights, parts, strict=True)),
            components=tuple(parts),
        )

    def metrics(self) -> dict[str, float]:
        """Return the number of failed calls of the last ``score``, by kind."""
        return {f"reward/{kind}": float(self._failures[kind]) for kind in FailureKind}


def score_with_model(
    model: RewardModel, items: Sequence[Item], *, tokens: Sequence[Sequence[int]]
) -> list[Outcome]:
    """Return one outcome per item, in order; a non-finite score is a failure."""
    outcomes = []
    for (prompt, _), score in zip(items, model.scores(tokens), strict=True):
        if math.isfinite(score):
            outcomes.append(Outcome(reward=score))
        else:
            message = f"the reward model gave {score} (prompt {prompt.prompt_id}, {prompt.source})"
            outcomes.append(Outcome(kind=FailureKind.NOT_FINITE, message=message))
    return outcomes
