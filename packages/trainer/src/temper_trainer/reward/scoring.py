"""Open what scores completions, and shape scores into rewards.

Scores come from reward functions, judges and reward models. Shaping applies scale, overlong
penalty, bounds and normalization; its sums are float64.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from temper_trainer.concurrency import gather_or_cancel
from temper_trainer.config.reward import REWARD_MODEL, OverlongConfig, RewardConfig, ShapingConfig
from temper_trainer.progress import track_progress
from temper_trainer.reward.registry import (
    check_rewards,
    find_rewards,
    get_function_config,
    resolve_reward,
)
from temper_trainer.reward.reward_calls import FailureKind, Item, PartScoring, RewardCall
from temper_trainer.reward.reward_processes import ProcessScoring
from temper_trainer.reward.reward_threads import ThreadScoring
from temper_trainer.reward.scoring_round import (
    ModelScoring,
    RewardModel,
    RewardParts,
    ScoredItem,
    ScoringRound,
    list_usages,
    measure_scores,
)
from temper_trainer.types import Prompt, Score

if TYPE_CHECKING:
    from temper_trainer.reward.judge_scoring import JudgeScoring


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
            config: The run's reward configuration.
            model: The reward model, if a part of the reward is its score.
            selected: Names of the rewards that prompts select, besides the main one.

        Raises:
            ConfigError: See check_rewards.
        """
        self._config = config
        self._model = model
        # Listed first: it may be an iterator.
        names = ["", *selected]
        self._names = find_rewards(config, names)
        self._description = self._describe()
        check_rewards(config, names)
        self._rewards = {
            name: RewardParts(weights=config.get_parts(name), is_sum=config.is_sum(name))
            for name in names
        }
        self._parts: dict[str, PartScoring | ModelScoring] = {}
        self._judges: dict[str, JudgeScoring] = {}
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> "Scorer":
        # Started here and not in the constructor, so that leaving the context always ends them.
        for name in self._names:
            self._parts[name] = self._open_part(name)
        return self

    def _open_part(self, name: str) -> PartScoring | ModelScoring:
        """Start what scores one part."""
        config = self._config
        if name == REWARD_MODEL:
            assert self._model is not None, (
                "a validated configuration that names a reward model has one"
            )
            return ModelScoring(self._model)
        if name in config.judges:
            from temper_trainer.reward.judge_scoring import JudgeScoring  # needs an extra

            self._judges[name] = JudgeScoring(config.judges[name], name=name)
            return self._judges[name]
        function = get_function_config(config, name)
        call = RewardCall(function=resolve_reward(function), arguments=dict(function.arguments))
        if config.num_workers:
            return ProcessScoring(
                call,
                timeout_s=config.timeout_s,
                num_workers=config.num_workers,
                max_retries=config.max_retries,
            )
        return ThreadScoring(
            call,
            name=function.function,
            timeout_s=config.timeout_s,
            num_threads=config.num_threads,
            max_retries=config.max_retries,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            part.close()
        self._parts = {}

    def open_round(
        self,
        prompts: Sequence[Prompt],
        *,
        priority: int = 0,
        cohorts: Sequence[int] | None = None,
    ) -> ScoringRound:
        """Return what scores the completions of rollouts that are requested together.

        Args:
            prompts: One prompt per rollout.
            priority: Completions of rounds with a smaller number are scored first.
            cohorts: One number per rollout. The reward model scores those with the same number in
                one pass; None is one pass for all.
        """
        assert self._parts, "a Scorer can only score inside its `with` block"
        return ScoringRound(
            self._config,
            prompts=prompts,
            rewards=self._rewards,
            parts=self._parts,
            name=self._description,
            priority=priority,
            cohorts=cohorts,
        )

    def measure(self, items: Sequence[ScoredItem]) -> dict[str, float]:
        """Return failures by kind, the mean per part, and the judges' metrics."""
        metrics = measure_scores(items, config=self._config, has_parts=len(self._names) > 1)
        for name, judge in self._judges.items():
            metrics |= judge.measure(list_usages(items, judge=name))
        return metrics

    def score(
        self, items: Sequence[Item], *, tokens: Sequence[Sequence[int]] | None = None
    ) -> list[Score]:
        """Return one score per (prompt, completion text), in order; for loops of your own.

        Args:
            items: Prompts and texts, for functions.
            tokens: Tokens of prompt and completion, per item; required with a reward model.

        Raises:
            RewardFailureError: If a larger fraction failed than reward.max_failure_fraction.
        """
        return asyncio.run(self._score_all(items, tokens=tokens or [()] * len(items)))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `score`; see `measure`."""
        return self._metrics

    async def _score_all(
        self, items: Sequence[Item], *, tokens: Sequence[Sequence[int]]
    ) -> list[Score]:
        scoring = self.open_round([prompt for prompt, _ in items])
        scored: dict[int, ScoredItem] = {}

        async def score(index: int) -> None:
            _, text = items[index]
            scored[index] = await scoring.score(index, text=text, tokens=tokens[index])

        try:
            with track_progress("rewards", total=len(items)):
                await gather_or_cancel(map(score, range(len(items))))
        finally:
            self._metrics = self.measure(list(scored.values()))
            # An error leaves out the completion with which the failures were too many.
            self._metrics |= {
                f"reward/{kind}": float(scoring.failures[kind]) for kind in FailureKind
            }
        return [scored[i].score for i in range(len(items))]

    def _describe(self) -> str:
        """Return what messages call the rewards."""
        parts = self._config.components
        if self._names != find_rewards(self._config, [""]):
            return f"the rewards {', '.join(self._names)}"
        return (
            f"reward.components {', '.join(parts)}"
            if parts
            else f"reward.function {self._config.function}"
        )


NORMALIZATION_EPSILON = 1e-8
"""Added to the standard deviation, so that equal rewards become 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStats:
    """Running mean and variance of all rewards; its fields are saved in checkpoints.

    Example:
        >>> stats = RunningStats().with_rewards([1.0, 0.0, 0.0, 1.0])
        >>> stats.mean, stats.std
        (0.5, 0.5)
    """

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
        # fsum rounds only once, so the statistics do not depend on reward order.
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
        lengths: Number of tokens per completion.
        max_tokens: Maximum completion length.
        config: Transformations to apply.
        running_stats: Statistics of all rewards before this step.
        baselines: Scores and lengths of baseline completions; shaped in the same way, but not
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
