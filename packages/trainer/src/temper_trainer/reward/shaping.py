"""Convert scores to rewards: scale, overlong penalty, bounds, normalization; sums in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from temper_trainer.config.reward import OverlongConfig, ShapingConfig

EPSILON = 1e-8
"""Added to the standard deviation, so that equal rewards become 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStats:
    """Running mean and variance of all rewards; its fields are saved in checkpoints."""

    count: float = 0.0
    """Number of rewards."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of (reward - mean)^2."""

    @property
    def std(self) -> float:
        """Standard deviation with divisor N; 0 before the second reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def updated(self, rewards: Sequence[float]) -> "RunningStats":
        """Return the statistics with more rewards.

        Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", equation 2.1.
        """
        if not rewards:
            return self
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
    moments: RunningStats
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
    moments: RunningStats,
    baselines: Sequence[tuple[float, int]] = (),
) -> Shaped:
    """Return the rewards of a step's completions.

    Args:
        scores: Finite scores.
        lengths: Tokens of each completion.
        max_tokens: Maximum length of a completion.
        config: Transformations to apply.
        moments: Statistics of all rewards before this step.
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
        return min(max(config.scale * score + penalty(length), low), high)

    penalties = [penalty(length) for length in lengths]
    rewards = [
        scale_and_bound(score, length) for score, length in zip(scores, lengths, strict=True)
    ]
    shaped_baselines = [scale_and_bound(score, length) for score, length in baselines]
    moments = moments.updated(rewards)
    metrics: dict[str, float] = {}
    if config.overlong is not None:
        metrics |= {
            "reward/overlong_mean": math.fsum(penalties) / len(penalties),
            "reward/overlong_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
        }
    if config.normalization == "none":
        return Shaped(rewards=rewards, baselines=shaped_baselines, moments=moments, metrics=metrics)
    stats = moments if config.normalization == "running" else RunningStats().updated(rewards)
    metrics["reward/std_before_normalization"] = stats.std

    def normalize(values: list[float]) -> list[float]:
        return [(value - stats.mean) / (stats.std + EPSILON) for value in values]

    return Shaped(
        rewards=normalize(rewards),
        baselines=normalize(shaped_baselines),
        moments=moments,
        metrics=metrics,
    )
