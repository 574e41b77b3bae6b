"""From score to reward: scale, the penalty of long completions, bounds, normalisation. Sums are float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from temper_trainer.config.reward import OverlongConfig, ShapingConfig

EPSILON = 1e-8
"""Added to the deviation, so that equal rewards become 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStats:
    """Count, mean and sum of squared distances of all rewards seen, from which a deviation follows; goes into checkpoints as it is."""

    count: float = 0.0
    """Rewards."""
    mean: float = 0.0
    """Of them."""
    squares: float = 0.0
    """Sum of (reward - mean) ** 2."""

    @property
    def std(self) -> float:
        """Deviation, divided by the count; 0 before the second reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def updated(self, rewards: Sequence[float]) -> "RunningStats":
        """With further rewards.

        Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", equation 2.1.
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
    """What ``shape_rewards`` returns."""

    rewards: list[float]
    """One per score, in their order."""
    moments: RunningStats
    """For the next step."""
    metrics: dict[str, float]
    """Numbers for the log."""
    baselines: list[float] = field(default_factory=list)
    """One per baseline, in their order."""


def compute_overlong_penalty(length: int, *, max_tokens: int, config: OverlongConfig) -> float:
    """DAPO's soft penalty of a completion, at most 0.

    0 up to max_tokens - buffer_tokens, then -penalty * (length - (max_tokens - buffer_tokens)) / buffer_tokens, and -penalty from
    max_tokens on.

    Source: Yu et al. 2025, arXiv:2503.14476, equation 13.
    """
    beyond = length - (max_tokens - config.buffer_tokens)
    return -config.penalty * min(max(beyond / config.buffer_tokens, 0.0), 1.0)


def shape_rewards(
    scores: Sequence[float],
    *,
    lengths: Sequence[int],
    max_tokens: int,
    config: ShapingConfig,
    moments: RunningStats,
    baselines: Sequence[tuple[float, int]] = (),
) -> Shaped:
    """Rewards of a step's completions.

    Args:
        scores: finite.
        lengths: tokens of each completion.
        max_tokens: the longest that one may be.
        config: what is done.
        moments: of all rewards before this step.
        baselines: scores and lengths of completions that rewards are compared with: shaped alike, and counted in no statistics.
    """
    low = -math.inf if config.low is None else config.low
    high = math.inf if config.high is None else config.high

    def penalty(length: int) -> float:
        return (
            0.0
            if config.overlong is None
            else compute_overlong_penalty(length, max_tokens=max_tokens, config=config.overlong)
        )

    def bounded(score: float, length: int) -> float:
        return min(max(config.scale * score + penalty(length), low), high)

    penalties = [penalty(length) for length in lengths]
    rewards = [bounded(score, length) for score, length in zip(scores, lengths, strict=True)]
    compared = [bounded(score, length) for score, length in baselines]
    moments = moments.updated(rewards)
    metrics: dict[str, float] = {}
    if config.overlong is not None:
        metrics |= {
            "reward/overlong_mean": math.fsum(penalties) / len(penalties),
            "reward/overlong_fraction": sum(penalty < 0 for penalty in penalties) / len(penalties),
        }
    if config.normalization == "none":
        return Shaped(rewards=rewards, baselines=compared, moments=moments, metrics=metrics)
    yardstick = moments if config.normalization == "running" else RunningStats().updated(rewards)
    metrics["reward/std_before_normalization"] = yardstick.std

    def normalised(values: list[float]) -> list[float]:
        return [(value - yardstick.mean) / (yardstick.std + EPSILON) for value in values]

    return Shaped(
        rewards=normalised(rewards),
        baselines=normalised(compared),
        moments=moments,
        metrics=metrics,
    )
