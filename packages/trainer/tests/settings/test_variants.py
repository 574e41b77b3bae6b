"""Test declarations of settings: tagged unions, ranges, and that reading them needs no torch."""

import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.policy_losses.clipped_losses import Gspo, Ppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.settings.ranges import PositiveInt, Range, UnitFloat
from temper_trainer.settings.variants import (
    Custom,
    Variant,
    find_choice,
    list_variants,
    settings,
    variant,
)


class Shape(Variant):
    __slots__ = ()


@variant("circle")
class Circle(Shape):
    radius: Annotated[float, Range(above=0, below=10)] = 1.0
    parts: PositiveInt | None = None


@variant("square")
class Square(Shape):
    width: UnitFloat = 0.5

    def __post_init__(self) -> None:
        if self.width == 0.25:
            raise ConfigError("a quarter")


def test_union_lists_its_own_variants_in_order() -> None:
    assert dict(list_variants(Shape)) == {"circle": Circle, "square": Square}
    assert Circle.name == "circle"
    assert list_variants(PolicyLoss)["ppo"] is Ppo


def test_second_variant_of_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'circle', which .*Circle already has"):

        @variant("circle")
        class Other(Shape):
            pass


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: Circle(radius=0.0), "radius of Circle is 0.0, but must be above 0 and below 10"),
        (lambda: Circle(radius=float("nan")), "radius of Circle is nan"),
        (lambda: Circle(parts=0), "parts of Circle is 0, but must be at least 1"),
        (lambda: Square(width=1.5), "width of Square is 1.5, but must be at least 0 and at most 1"),
        (lambda: Square(width=0.25), "a quarter"),
    ],
)
def test_ranges_and_own_checks_hold_in_python(build: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build()


def test_class_that_derives_from_settings_has_the_ranges_of_both() -> None:
    @settings
    class Disc(Circle):
        depth: UnitFloat = 0.0

    with pytest.raises(ConfigError, match="radius of Disc"):
        Disc(radius=-1.0)
    with pytest.raises(ConfigError, match="depth of Disc"):
        Disc(depth=2.0)


def test_choice_describes_what_a_type_accepts() -> None:
    closed, opened = find_choice(Shape), find_choice(Shape | Custom | None)
    assert closed is not None
    assert opened is not None
    assert (closed.names, closed.is_open, closed.is_optional) == (
        ("circle", "square"),
        False,
        False,
    )
    assert (opened.is_open, opened.is_optional) == (True, True)
    assert opened.find_class("my_shapes:Star") is Custom
    assert closed.find_class("my_shapes:Star") is None
    assert find_choice(Circle) is None
    assert "Did you mean 'circle'?" in closed.describe_unknown("cirle")


def test_losses_are_read_without_torch() -> None:
    code = (
        "import sys; from temper_trainer.config.algorithm import AlgorithmConfig; "
        "AlgorithmConfig(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_published_clips_are_the_defaults() -> None:
    assert (Gspo().clip_low, Gspo().clip_high) == (3e-4, 4e-4)
