"""Score completions, stop after too many failures, and shape scores into rewards.

Scores come from reward functions and reward models. Shaping applies scale, overlong penalty, bounds
and normalization; its sums are float64.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.config.reward import REWARD_MODEL, OverlongConfig, RewardConfig, ShapingConfig
from temper_trainer.progress import track_progress
from temper_trainer.reward.registry import (
    check_rewards,
    find_rewards,
    get_function_config,
    resolve_reward,
)
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

    def __init__(
        self,
        config: RewardConfig,
        *,
        model: RewardModel | None = None,
        selected: Iterable[str] = (),
    ) -> None:
        """Resolve the functions; processes start on entering the context.

        Args:
            config: Reward configuration of the run.
            model: The reward model, if a part of the reward is its score.
            selected: Names of the rewards that prompts select, besides the main one.

        Raises:
            ConfigError: See check_rewards.
        """
        self._config = config
        self._model = model
        self._parts = find_rewards(config, ["", *selected])
        check_rewards(config, ["", *selected])
        self._scorings: dict[str, _Scoring | None] = {}
        self._failures: Counter[FailureKind] = Counter()
        self._means: dict[str, float] = {}
        self._judge_metrics: list[Callable[[], dict[str, float]]] = []

    def __enter__(self) -> "Scorer":
        # Started here and not in the constructor, so that leaving the context always ends them.
        for name in self._parts:
            self._scorings[name] = self._open_scoring(name)
        return self

    def _open_scoring(self, name: str) -> _Scoring | None:
        """Start what scores one part; None for the reward model."""
        config = self._config
        if name == REWARD_MODEL:
            return None
        if name in config.judges:
            from temper_trainer.reward.judge_scoring import JudgeScoring  # needs an extra

            judge = JudgeScoring(config.judges[name], name=name)
            self._judge_metrics.append(judge.metrics)
            return judge
        function = get_function_config(config, name)
        call = RewardCall(function=resolve_reward(function), arguments=dict(function.arguments))
        if config.num_workers:
            return ProcessScoring(call, timeout_s=config.timeout_s, num_workers=config.num_workers)
        return ThreadScoring(call, timeout_s=config.timeout_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for scoring in self._scorings.values():
            if scoring is not None:
                scoring.close()
        self._scorings = {}

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
        parts = [self._config.get_parts(prompt.reward) for prompt, _ in items]
        max_failures = int(self._config.max_failure_fraction * len(items))
        by_item: list[dict[str, Outcome]] = [{} for _ in items]
        with track_progress("rewards", total=sum(map(len, parts))):
            for name, scoring in self._scorings.items():
                indices = [i for i, names in enumerate(parts) if name in names]
                if items and not indices:
                    continue
                chosen = [items[i] for i in indices]
                if scoring is None:
                    assert tokens is not None
                    outcomes = self._score_with_model(chosen, [tokens[i] for i in indices])
                else:
                    outcomes = scoring.run(chosen, max_failures=max_failures)
                self._check_failures(
                    outcomes, num_items=len(items), num_left=len(chosen) - len(outcomes)
                )
                for i, outcome in zip(indices, outcomes, strict=True):
                    by_item[i][name] = outcome
        self._check_failures(list(map(_find_failure, by_item)), num_items=len(items))
        self._means = _measure_parts(by_item) if len(self._parts) > 1 else {}
        scores = [
            _combine(outcomes, weights, is_sum=self._config.is_sum(prompt.reward))
            for (prompt, _), outcomes, weights in zip(items, by_item, parts, strict=True)
        ]
        self._means |= _measure_sums(items, scores, names=self._config.sums)
        return scores

    def _check_failures(
        self, outcomes: Sequence[Outcome], *, num_items: int, num_left: int = 0
    ) -> None:
        """Count failures, and raise if there are more than accepted of this number of items.

        Some calls are left if so many others failed that they were not made.
        """
        failed = [outcome for outcome in outcomes if outcome.kind is not None]
        self._failures = Counter(outcome.kind for outcome in failed if outcome.kind is not None)
        if len(failed) <= self._config.max_failure_fraction * num_items:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in self._failures.items())
        first = failed[0].redacted()
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
        if self._parts != find_rewards(self._config, [""]):
            return f"the rewards {', '.join(self._parts)}"
        return (
            f"reward.components {', '.join(parts)}"
            if parts
            else f"reward.function {self._config.function}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the failures by kind, the mean of each part, and the judges' metrics.

        They are those of the last ``score``.
        """
        metrics = {f"reward/{kind}": float(self._failures[kind]) for kind in FailureKind}
        metrics |= self._means
        for measure in self._judge_metrics:
            metrics |= measure()
        return metrics


def _find_failure(outcomes: Mapping[str, Outcome]) -> Outcome:
    """Return the first failure among the parts of an item, else the outcome of its first part.

    An item with several failed parts counts once. Its message goes to the log and to samples.jsonl.
    """
    known = list(outcomes.values())
    return next((each for each in known if each.kind is not None), known[0]).redacted()


def _combine(
    outcomes: Mapping[str, Outcome], weights: Mapping[str, float], *, is_sum: bool
) -> Score:
    """Return an item's reward or, if none of its parts failed, their weighted sum."""
    score = _find_failure(outcomes).to_score()
    if score.reward is None or not is_sum:
        return score
    rewards = [reward for name in weights if (reward := outcomes[name].reward) is not None]
    return Score(
        reward=sum(w * each for w, each in zip(weights.values(), rewards, strict=True)),
        components=tuple(rewards),
    )


def _measure_parts(by_item: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    """Return the mean of each part over the items that have it, and its number of failures."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for outcomes in by_item for name in outcomes):
        outcomes = [each[name] for each in by_item if name in each]
        rewards = [each.reward for each in outcomes if each.reward is not None]
        # Import paths have a colon, which not every tracker accepts.
        key = "reward/" + re.sub(r"[^.\w-]", "_", name)
        metrics[f"{key}/failed"] = float(len(outcomes) - len(rewards))
        if rewards:
            metrics[f"{key}/mean"] = math.fsum(rewards) / len(rewards)
    return metrics


def _measure_sums(
    items: Sequence[Item], scores: Sequence[Score], *, names: Iterable[str]
) -> dict[str, float]:
    """Return the mean of each of reward.sums over the completions that it scored."""
    metrics: dict[str, float] = {}
    for name in names:
        chosen = [
            score.reward
            for (prompt, _), score in zip(items, scores, strict=True)
            if prompt.reward == name and score.reward is not None
        ]
        if chosen:
            metrics[f"reward/{name}/mean"] = math.fsum(chosen) / len(chosen)
    return metrics


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
