"""Test how scores become rewards."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config.reward import OverlongConfig, ShapingConfig
from temper_trainer.reward.scoring import RunningStats, compute_overlong_penalty, shape_rewards


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (120, -2.0)]
)
def test_overlong_penalty_grows_over_the_buffer(length: int, expected: float) -> None:
    # 100 tokens at most, a buffer of 20: nothing up to 80, then -2 * (length - 80) / 20.
    assert compute_overlong_penalty(
        length, max_tokens=100, config=OverlongConfig(buffer_tokens=20, penalty=2.0)
    ) == pytest.approx(expected)


def test_scale_penalty_and_bounds_in_this_order() -> None:
    # 2 * 1 = 2, bounded to 1.5; 2 * 0 - 1 = -1, bounded to -0.5; 2 * 0.5 - 0.5 = 0.5.
    config = ShapingConfig(scale=2.0, overlong=OverlongConfig(buffer_tokens=10), low=-0.5, high=1.5)
    shaped = shape_rewards(
        [1.0, 0.0, 0.5],
        lengths=[1, 20, 15],
        max_tokens=20,
        config=config,
        running_stats=RunningStats(),
    )
    assert shaped.rewards == pytest.approx([1.5, -0.5, 0.5])
    assert shaped.metrics == pytest.approx(
        {"reward/overlong_mean": -0.5, "reward/overlong_fraction": 2 / 3}
    )


def test_rewards_are_normalized_over_the_step() -> None:
    # Mean 2, deviation sqrt((1 + 1) / 2) = 1.
    shaped = shape_rewards(
        [1.0, 3.0],
        lengths=[1, 1],
        max_tokens=9,
        config=ShapingConfig(normalization="step"),
        running_stats=RunningStats(count=5.0, mean=9.0),
    )
    assert shaped.rewards == pytest.approx([-1.0, 1.0])


def test_running_statistics_cover_all_rewards_so_far() -> None:
    # 1, 3, then 5: mean 3, squares 4 + 0 + 4 = 8.
    running_stats = RunningStats().with_rewards([1.0, 3.0]).with_rewards([5.0])
    assert (running_stats.count, running_stats.mean, running_stats.squares) == pytest.approx(
        (3.0, 3.0, 8.0)
    )
    shaped = shape_rewards(
        [5.0],
        lengths=[1],
        max_tokens=9,
        config=ShapingConfig(normalization="running"),
        running_stats=RunningStats().with_rewards([1.0, 3.0]),
    )
    assert shaped.rewards == pytest.approx([2.0 / (8.0 / 3.0) ** 0.5])


def test_baselines_are_shaped_but_not_counted() -> None:
    # 2 * 1 - 0.5 = 1.5, less the mean of 2 and 6, over their deviation of 2: -1.25.
    config = ShapingConfig(
        scale=2.0, overlong=OverlongConfig(buffer_tokens=10), normalization="step"
    )
    shaped = shape_rewards(
        [1.0, 3.0],
        lengths=[1, 1],
        max_tokens=20,
        config=config,
        running_stats=RunningStats(),
        baselines=[(1.0, 15)],
    )
    assert shaped.rewards == pytest.approx([-1.0, 1.0])
    assert shaped.baselines == pytest.approx([-1.25])
    assert shaped.running_stats.count == 2.0
    assert shaped.metrics["reward/overlong_fraction"] == 0.0


def test_default_shaping_returns_the_scores() -> None:
    assert shape_rewards(
        [0.1, 0.7],
        lengths=[1, 1],
        max_tokens=1,
        config=ShapingConfig(),
        running_stats=RunningStats(),
    ).rewards == [0.1, 0.7]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"scale": 0.0}, "would make all scores equal"), ({"low": 1.0, "high": 0.0}, "smaller")],
)
def test_invalid_shaping_settings_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ShapingConfig(**settings)  # type: ignore[arg-type]
