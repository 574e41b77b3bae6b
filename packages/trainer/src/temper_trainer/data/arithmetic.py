"""Word problems of one or two steps in GSM8K's format, made from a seed; train and test never share a question.

A problem is a question, and an answer text that ends in ``#### N``:

    Tom buys 6 boxes with 4 pens each. Ann gives Tom 3 more pens. How many pens does Tom have now?
    6*4=24
    24+3=27
    #### 27

A demonstration may be wrong on purpose: its first operation is another one, carried through to the end. It teaches the format and
half of the arithmetic, and leaves the rest to reinforcement learning.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from temper_trainer.config.data import SourceConfig
from temper_trainer.data.rows import DataError, Row

Operator = Literal["+", "-", "*"]

NAMES = ("Tom", "Ann", "Ben", "Mia", "Sam", "Lily", "Max", "Eva", "Leo", "Zoe", "Jack", "Nina")
ITEMS = (
    "apples",
    "pens",
    "books",
    "cards",
    "coins",
    "shells",
    "stickers",
    "marbles",
    "cookies",
    "stamps",
)

MAX_ADDEND = 10
MAX_FACTOR = 5
TEST_SHARE = 10
"""One question in this many belongs to the test split."""
_MAX_REPEATS = 1000
"""Draws in a row that gave nothing new before the generator says that it has no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation; None stands for the result of the step before."""

    left: int | None
    """Left operand."""
    operator: Operator
    """What is done."""
    right: int | None
    """Right operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the way to its answer."""

    question: str
    """The story."""
    steps: tuple[Step, ...]
    """One or two."""


def solve(steps: Sequence[Step]) -> str:
    """The answer text: one equation a line, then ``#### N``."""
    lines, carried = [], 0
    for step in steps:
        left = carried if step.left is None else step.left
        right = carried if step.right is None else step.right
        carried = _apply(left, step.operator, right)
        lines.append(f"{left}{step.operator}{right}={carried}")
    return "\n".join([*lines, f"#### {carried}"])


def with_wrong_first_operation(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps with another operation in the first; no result is ever below 1, as in true answers.

    A sum becomes a difference, or a product where that would be below 1; a difference or a product becomes a sum. A subtraction in
    the second step that would then fall below 1 becomes an addition.
    """
    first = steps[0]
    assert first.left is not None
    assert first.right is not None
    operator: Operator = "+" if first.operator != "+" else "-" if first.left > first.right else "*"
    carried = _apply(first.left, operator, first.right)
    wrong = [replace(first, operator=operator)]
    for step in steps[1:]:
        left = carried if step.left is None else step.left
        right = carried if step.right is None else step.right
        wrong.append(
            replace(step, operator="+") if step.operator == "-" and left <= right else step
        )
    return tuple(wrong)


def draw_problem(rng: random.Random) -> Problem:
    """One of eight stories with random names, things and numbers: addends from 2 to 10, factors from 2 to 5, results above 0."""
    one, other = rng.sample(NAMES, 2)
    return rng.choice(_STORIES)(rng, one, other, rng.choice(ITEMS))


def is_test_question(question: str) -> bool:
    """Whether a question belongs to the test split, by its own hash: the same whatever the seed."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % TEST_SHARE == 0


def arithmetic_rows(config: SourceConfig) -> list[Row]:
    """``max_rows`` different problems of one split, each with its true answer and its demonstration.

    The problems depend on (seed, split) only; which demonstrations are wrong also on the share.

    Raises:
        DataError: more rows are asked for than there are problems.
    """
    assert config.max_rows is not None
    problems = random.Random(f"problems {config.seed}")
    mistakes = random.Random(f"mistakes {config.seed}")
    seen: set[str] = set()
    rows: list[Row] = []
    while len(rows) < config.max_rows:
        problem = _draw_unseen(problems, seen, is_test=config.split == "test")
        is_wrong = mistakes.random() < config.wrong_first_operation
        demonstrated = with_wrong_first_operation(problem.steps) if is_wrong else problem.steps
        rows.append(
            Row(
                row_id=len(rows),
                prompt=problem.question,
                answer=solve(problem.steps),
                solution=solve(demonstrated),
                source=f"arithmetic[{config.split}] row {len(rows)}",
                route=""
                if config.route_key is None
                else ("one" if len(problem.steps) == 1 else "two"),
            )
        )
    return rows


def _draw_unseen(rng: random.Random, seen: set[str], *, is_test: bool) -> Problem:
    for _ in range(_MAX_REPEATS):
        problem = draw_problem(rng)
        if problem.question not in seen and is_test_question(problem.question) == is_test:
            seen.add(problem.question)
            return problem
    raise DataError(
        f"an arithmetic source ran out of different problems after {len(seen)}: lower max_rows."
    )


def _apply(left: int, operator: Operator, right: int) -> int:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right


def _addend(rng: random.Random) -> int:
    return rng.randint(2, MAX_ADDEND)


def _factor(rng: random.Random) -> int:
    return rng.randint(2, MAX_FACTOR)


def _receives(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    question = f"{one} has {x} {things}. {other} gives {one} {y} more {things}. How many {things} does {one} have now?"
    return Problem(question=question, steps=(Step(left=x, operator="+", right=y),))


def _gives_away(rng: random.Random, one: str, other: str, things: str) -> Problem:
    y = _addend(rng)
    x = y + rng.randint(1, MAX_ADDEND)
    question = f"{one} has {x} {things}. {one} gives {y} {things} to {other}. How many {things} does {one} have left?"
    return Problem(question=question, steps=(Step(left=x, operator="-", right=y),))


def _buys_boxes(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _factor(rng), _factor(rng)
    question = f"{one} buys {x} boxes. Each box has {y} {things}. How many {things} does {one} buy in total?"
    return Problem(question=question, steps=(Step(left=x, operator="*", right=y),))


def _buys_boxes_and_receives(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y, z = _factor(rng), _factor(rng), _addend(rng)
    question = f"{one} buys {x} boxes with {y} {things} each. {other} gives {one} {z} more {things}. How many {things} does {one} have now?"
    return Problem(
        question=question,
        steps=(Step(left=x, operator="*", right=y), Step(left=None, operator="+", right=z)),
    )


def _loses_from_bags(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _factor(rng), _factor(rng)
    z = rng.randint(1, min(MAX_ADDEND, x * y - 1))
    question = f"{one} has {x} bags with {y} {things} each. {one} loses {z} {things}. How many {things} are left?"
    return Problem(
        question=question,
        steps=(Step(left=x, operator="*", right=y), Step(left=None, operator="-", right=z)),
    )


def _buys_and_gives_away(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    z = rng.randint(1, min(MAX_ADDEND, x + y - 1))
    question = f"{one} has {x} {things} and buys {y} more. Then {one} gives {z} {things} to {other}. How many {things} does {one} have left?"
    return Problem(
        question=question,
        steps=(Step(left=x, operator="+", right=y), Step(left=None, operator="-", right=z)),
    )


def _has_more_than(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    question = f"{one} has {x} {things}. {other} has {y} more {things} than {one}. How many {things} do they have together?"
    return Problem(
        question=question,
        steps=(Step(left=x, operator="+", right=y), Step(left=x, operator="+", right=None)),
    )


def _has_times_as_many(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, times = _addend(rng), rng.randint(2, 3)
    question = f"{one} has {x} {things}. {other} has {times} times as many {things} as {one}. How many {things} do they have together?"
    return Problem(
        question=question,
        steps=(Step(left=x, operator="*", right=times), Step(left=x, operator="+", right=None)),
    )


_STORIES = (
    _receives,
    _gives_away,
    _buys_boxes,
    _buys_boxes_and_receives,
    _loses_from_bags,
    _buys_and_gives_away,
    _has_more_than,
    _has_times_as_many,
)
