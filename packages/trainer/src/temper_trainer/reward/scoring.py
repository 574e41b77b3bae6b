"""Score completions, stop after too many failures, and shape scores into rewards.

Scores come from reward functions and reward models. Shaping applies scale, overlong penalty, bounds
and normalization; its sums are float64.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.config.reward import REWARD_MODEL, OverlongConfig, RewardConfig, ShapingConfig
from temper_trainer.progress import track_progress
from temper_trainer.reward.registry import resolve_reward, split_components
from temper_trainer.reward.reward_calls import (
    FailureKind,
    Item,
    Outcome,
    ProcessScoring,
    RewardCall,
)
from temper_trainer.reward.reward_threads import ThreadScoring
from temper_trainer.types import Score


class RewardModel(Protocol):
    """A reward model, wherever it runs."""

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each token sequence, in order."""
        ...


class RewardFailureError(TemperError, RuntimeError):
    """So many reward calls failed that training on the others would be misleading."""


class _Scoring(Protocol):
    def run(self, items: Sequence[Item], *, max_failures: int) -> list[Outcome]: ...

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
        # Started here and not in the constructor, so that leaving the context always ends them.
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
        max_failures = int(self._config.max_failure_fraction * len(items))
        by_part: list[list[Outcome]] = []
        with track_progress("rewards", total=len(items) * len(self._scorings)):
            for scoring in self._scorings:
                outcomes = (
                    self._score_with_model(items, tokens)
                    if scoring is None
                    else scoring.run(items, max_failures=max_failures)
                )
                self._check_failures(outcomes, num_items=len(items))
                by_part.append(outcomes)
        # An item with several failed components counts once, with its first failure. Its message
        # goes to the log and to samples.jsonl.
        outcomes = [
            next((each for each in of_item if each.kind is not None), of_item[0]).redacted()
            for of_item in zip(*by_part, strict=True)
        ]
        self._check_failures(outcomes, num_items=len(items))
        scores = [outcome.to_score() for outcome in outcomes]
        if not self._weights:
            return scores
        return [
            self._weighted_score(score, of_item)
            for score, of_item in zip(scores, zip(*by_part, strict=True), strict=True)
        ]

    def _check_failures(self, outcomes: Sequence[Outcome], *, num_items: int) -> None:
        """Count failures, and raise if there are more than accepted of this number of items.

        There are fewer outcomes than items if so many calls failed that the others were not made.
        """
        failed = [outcome for outcome in outcomes if outcome.kind is not None]
        self._failures = Counter(outcome.kind for outcome in failed if outcome.kind is not None)
        if len(failed) <= self._config.max_failure_fraction * num_items:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in self._failures.items())
        first = failed[0].redacted()
        num_left = num_items - len(outcomes)
        not_made = f"; the last {num_left} were not made" if num_left else ""
        raise RewardFailureError(
            f"{len(failed)} of {num_items} calls of {self._name} failed ({counts}){not_made}: more "
            f"than reward.max_failure_fraction = {self._config.max_failure_fraction}. The "
            f"first: {first.kind}: {first.message}\n{first.trace}"
        )

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
            message = (
                f"the reward model gave {score} (prompt {prompt.prompt_id}, {prompt.location})"
            )
            outcomes.append(Outcome(kind=FailureKind.NOT_FINITE, message=message))
    return outcomes


NORMALIZATION_EPSILON = 1e-8
"""Added to the standard deviation, so that equal rewards become 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStats:
    """Running mean and variance of all rewards; its fields are saved in checkpoints."""

    count: float = 0.0
    """Number of rewards so far, as a float for checkpoints."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of (reward - mean)^2."""

    @property
    def std(self) -> float:
        """Standard deviation with divisor N; 0 before the second reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def normalize(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards minus the mean, divided by the standard deviation."""
        return [(reward - self.mean) / (self.std + NORMALIZATION_EPSILON) for reward in rewards]

    def with_rewards(self, rewards: Sequence[float]) -> "RunningStats":
        """Return the statistics with more rewards.

        Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", equation 2.1.
        """
        if not rewards:
            return self
        # fsum rounds only once, so the statistics do not depend on the order of the rewards.
        count, mean = len(rewards), math.fsum(rewards) / len(rewards)
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        total, distance = self.count + count, mean - self.mean
        return RunningStats(
            count=total,
            mean=self.mean + distance * count / total,
            squares=self.squares + squares + distance**2 * self.count * count / total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """Rewards of a step, and the statistics for the next."""

    rewards: list[float]
    """One per score, in order."""
    running_stats: RunningStats
    """Statistics of all rewards so far."""
    metrics: dict[str, float]
    baselines: list[float] = field(default_factory=list)
    """One per baseline, in order."""


def compute_overlong_penalty(length: int, *, max_tokens: int, config: OverlongConfig) -> float:
    """Return DAPO's soft overlong penalty of a completion, at most 0.

        start = max_tokens - buffer_tokens
        -penalty * clip((length - start) / buffer_tokens, 0, 1)

    Source: Yu et al. 2025, arXiv:2503.14476, equation 13.
    """
    excess = length - (max_tokens - config.buffer_tokens)
    return -config.penalty * min(max(excess / config.buffer_tokens, 0.0), 1.0)


def shape_rewards(
    scores: Sequence[float],
    *,
    lengths: Sequence[int],
    max_tokens: int,
    config: ShapingConfig,
    running_stats: RunningStats,
    baselines: Sequence[tuple[float, int]] = (),
) -> Shaped:
    """Return the rewards of a step's completions.

    Args:
        scores: Finite scores.
        lengths: Tokens of each completion.
        max_tokens: Maximum length of a completion.
        config: Transformations to apply.
        running_stats: Statistics of all rewards before this step.
        baselines: Scores and lengths of baseline completions, which are shaped alike but not
            counted in any statistics.
    """
    low = -math.inf if config.low is None else config.low
    high = math.inf if config.high is None else config.high

    def penalty(length: int) -> float:
        return (
            0.0
            if config.overlong is None
            else compute_overlong_penalty(length, max_tokens=max_tokens, config=config.overlong)
        )

    def scale_and_bound(score: float, length: int) -> float:
        # The bounds come last, so that they also hold for the penalized reward.
        return min(max(config.scale * score + penalty(length), low), high)

    penalties = [penalty(length) for length in lengths]
    rewards = [
        scale_and_bound(score, length) for score, length in zip(scores, lengths, strict=True)
    ]
    shaped_baselines = [scale_and_bound(score, length) for score, length in baselines]
    # Updated before normalizing, so that the first step has statistics, too.
    running_stats = running_stats.with_rewards(rewards)
    metrics: dict[str, float] = {}
    if config.overlong is not None:
        metrics |= {
            "reward/overlong_mean": math.fsum(penalties) / len(penalties),
            "reward/overlong_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
        }
    if config.normalization != "none":
        is_running = config.normalization == "running"
        stats = running_stats if is_running else RunningStats().with_rewards(rewards)
        metrics["reward/std_before_normalization"] = stats.std
        rewards, shaped_baselines = stats.normalize(rewards), stats.normalize(shaped_baselines)
    return Shaped(
        rewards=rewards, baselines=shaped_baselines, running_stats=running_stats, metrics=metrics
    )
