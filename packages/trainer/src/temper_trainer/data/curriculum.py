"""Order the rows of an epoch by their difficulty."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from temper_trainer.types import Prompt

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum(Generic[Item]):
    """The order of an epoch from easy to hard items."""

    get_difficulty: Callable[[Item], float]
    """Returns the difficulty of an item, a finite number."""
    shuffled_fraction: float = 0.0
    """Fraction of the items that exchange their positions at random, in [0, 1]."""


def sort_by_difficulty(
    order: Sequence[int],
    difficulties: Sequence[float],
    *,
    seed: int,
    epoch: int,
    shuffled_fraction: float,
) -> list[int]:
    """Return the indices of an epoch from easy to hard, equally difficult ones in their order.

    A fraction of the positions is then drawn by (seed, epoch), and the indices at them are
    shuffled. With the fraction 1 the result is a random order.

    Example:
        >>> difficulties = [3.0, 1.0, 2.0, 1.0]
        >>> sort_by_difficulty(
        ...     [2, 3, 0, 1], difficulties, seed=0, epoch=0, shuffled_fraction=0.0
        ... )
        [3, 1, 2, 0]
    """
    ordered = sorted(order, key=difficulties.__getitem__)
    drawn = list(range(len(ordered)))
    random.Random(f"curriculum {seed} {epoch}").shuffle(drawn)
    drawn = drawn[: round(shuffled_fraction * len(ordered))]
    # The drawn positions are in random order, so their indices, taken in another one, are shuffled.
    moved = [ordered[position] for position in sorted(drawn)]
    for position, index in zip(drawn, moved, strict=True):
        ordered[position] = index
    return ordered


def get_difficulty(prompt: Prompt) -> float:
    """Return the difficulty of a prompt whose source has a `difficulty_key`."""
    assert prompt.difficulty is not None
    return prompt.difficulty


def measure_difficulty(prompts: Iterable[Prompt]) -> dict[str, float]:
    """Return the metric ``data/difficulty``, the mean over the prompts that have a difficulty.

    Empty if none has one.
    """
    difficulties = [prompt.difficulty for prompt in prompts if prompt.difficulty is not None]
    return {"data/difficulty": sum(difficulties) / len(difficulties)} if difficulties else {}
