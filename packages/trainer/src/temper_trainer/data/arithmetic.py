"""Generated word problems in GSM8K's format, of one or two steps by default.

A problem is a question, and an answer text that ends in ``#### N``:

    Tom buys 6 boxes with 4 pens each. Ann gives Tom 3 more pens. How many pens does Tom have now?
    6*4=24
    24+3=27
    #### 27

A demonstration may be wrong on purpose: its first operation is replaced, and the wrong result is
carried through to the answer. Such demonstrations teach the format and leave room for RL to
improve. Train and test never share a question.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from temper_trainer.config.data import ArithmeticSource
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
MAX_MULTIPLIED = 30
"""Largest number that an event of a long problem multiplies."""
TEST_MODULUS = 10
"""One question in this many belongs to the test split."""
_MAX_REPEATS = 1000
"""Number of draws without a new question after which the problems count as exhausted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation; an operand of None is the previous step's result."""

    left: int | None
    operator: Operator
    right: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the operations that solve it."""

    question: str
    steps: tuple[Step, ...]
    """One operation or more."""


def solve(steps: Sequence[Step]) -> str:
    """Return the answer text: one equation per line, then ``#### N``."""
    lines, carried = [], 0
    for step in steps:
        left = carried if step.left is None else step.left
        right = carried if step.right is None else step.right
        carried = _apply(left, step.operator, right)
        lines.append(f"{left}{step.operator}{right}={carried}")
    return "\n".join([*lines, f"#### {carried}"])


def replace_first_operation(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps with a wrong first operation; all results stay at least 1.

    A sum becomes a difference, or a product if the difference would be below 1; a difference or a
    product becomes a sum. Later subtractions that would then fall below 1 become additions.
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
        if step.operator == "-" and left <= right:
            step = replace(step, operator="+")
        wrong.append(step)
        carried = _apply(left, step.operator, right)
    return tuple(wrong)


def draw_problem(rng: random.Random) -> Problem:
    """Draw one of eight stories with random names, items and numbers.

    Addends are 2 to 10, factors 2 to 5, and results above 0.
    """
    one, other = rng.sample(NAMES, 2)
    return rng.choice(_STORIES)(rng, one, other, rng.choice(ITEMS))


def draw_long_problem(rng: random.Random, *, num_operations: int) -> Problem:
    """Draw a story of events that each change the number of one person's items.

    Sums and differences change the number by 1 to 10, products by a factor of 2 or 3. All results
    are above 0, and only numbers up to MAX_MULTIPLIED are multiplied.
    """
    one, other = rng.sample(NAMES, 2)
    things = rng.choice(ITEMS)
    carried = _addend(rng)
    sentences = [f"{one} has {carried} {things}."]
    steps: list[Step] = []
    for _ in range(num_operations):
        operator, right = _draw_event(rng, carried)
        steps.append(Step(left=None if steps else carried, operator=operator, right=right))
        template = rng.choice(_EVENTS[operator])
        sentences.append(template.format(one=one, other=other, number=right, things=things))
        carried = _apply(carried, operator, right)
    sentences.append(f"How many {things} does {one} have now?")
    return Problem(question=" ".join(sentences), steps=tuple(steps))


def is_test_question(question: str) -> bool:
    """Return True if a question is in the test split, decided by its hash and not by the seed."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % TEST_MODULUS == 0


def generate_arithmetic_rows(config: ArithmeticSource) -> list[Row]:
    """Generate ``max_rows`` different problems of one split, with answers and demonstrations.

    The problems depend only on (seed, split); the choice of wrong demonstrations also on their
    fraction.

    Raises:
        DataError: If there are fewer different problems than max_rows.
    """
    problems = random.Random(f"problems {config.seed}")
    # Use a separate generator, so that the fraction of wrong demonstrations does not change the
    # problems.
    mistakes = random.Random(f"mistakes {config.seed}")
    seen: set[str] = set()
    rows: list[Row] = []
    while len(rows) < config.max_rows:
        problem = _draw_unseen(problems, seen, config)
        is_wrong = mistakes.random() < config.wrong_first_operation
        demonstrated = replace_first_operation(problem.steps) if is_wrong else problem.steps
        rows.append(
            Row(
                row_id=len(rows),
                prompt=problem.question,
                answer=solve(problem.steps),
                solution=solve(demonstrated),
                location=f"{config.location} row {len(rows)}",
                teacher_prompt=None
                if config.teacher_prompt_key is None
                else f"{solve(problem.steps)} {problem.question}",
                completion=None if config.completion_key is None else solve(demonstrated),
                difficulty=None if config.difficulty_key is None else float(len(problem.steps)),
                route="" if config.route_key is None else _count_operations(problem),
                category="" if config.category_key is None else _count_operations(problem),
                reward=config.reward or ""
                if config.reward_key is None
                else _count_operations(problem),
                environment=config.environment or "",
            )
        )
    return rows


def _count_operations(problem: Problem) -> str:
    return {1: "one", 2: "two"}.get(len(problem.steps), "more")


def _draw_unseen(rng: random.Random, seen: set[str], config: ArithmeticSource) -> Problem:
    is_test = config.split == "test"
    for _ in range(_MAX_REPEATS):
        if config.max_operations == 2:
            problem = draw_problem(rng)
        else:
            count = rng.randint(1, config.max_operations)
            problem = draw_long_problem(rng, num_operations=count)
        if problem.question not in seen and is_test_question(problem.question) == is_test:
            seen.add(problem.question)
            return problem
    raise DataError(
        f"an arithmetic source has only about {len(seen)} different problems: lower max_rows."
    )


def _apply(left: int, operator: Operator, right: int) -> int:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right


def _draw_event(rng: random.Random, carried: int) -> tuple[Operator, int]:
    """Draw the operator and the right operand of an event of a long problem."""
    operators: list[Operator] = ["+", "+"]
    if carried > 1:
        operators += ["-", "-"]
    if carried <= MAX_MULTIPLIED:
        operators += ["*"]
    operator = rng.choice(operators)
    match operator:
        case "+":
            return operator, _addend(rng)
        case "-":
            return operator, rng.randint(1, min(MAX_ADDEND, carried - 1))
        case "*":
            return operator, rng.randint(2, 3)


def _addend(rng: random.Random) -> int:
    return rng.randint(2, MAX_ADDEND)


def _factor(rng: random.Random) -> int:
    return rng.randint(2, MAX_FACTOR)


def _receives(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    question = (
        f"{one} has {x} {things}. {other} gives {one} {y} more {things}. How many {things} does "
        f"{one} have now?"
    )
    return Problem(question=question, steps=(Step(left=x, operator="+", right=y),))


def _gives_away(rng: random.Random, one: str, other: str, things: str) -> Problem:
    y = _addend(rng)
    x = y + rng.randint(1, MAX_ADDEND)
    question = (
        f"{one} has {x} {things}. {one} gives {y} {things} to {other}. How many {things} does "
        f"{one} have left?"
    )
    return Problem(question=question, steps=(Step(left=x, operator="-", right=y),))


def _buys_boxes(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _factor(rng), _factor(rng)
    question = (
        f"{one} buys {x} boxes. Each box has {y} {things}. How many {things} does {one} buy in "
        "total?"
    )
    return Problem(question=question, steps=(Step(left=x, operator="*", right=y),))


def _buys_boxes_and_receives(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y, z = _factor(rng), _factor(rng), _addend(rng)
    question = (
        f"{one} buys {x} boxes with {y} {things} each. {other} gives {one} {z} more {things}. How "
        f"many {things} does {one} have now?"
    )
    return Problem(
        question=question,
        steps=(Step(left=x, operator="*", right=y), Step(left=None, operator="+", right=z)),
    )


def _loses_from_bags(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _factor(rng), _factor(rng)
    z = rng.randint(1, min(MAX_ADDEND, x * y - 1))
    question = (
        f"{one} has {x} bags with {y} {things} each. {one} loses {z} {things}. How many {things} "
        "are left?"
    )
    return Problem(
        question=question,
        steps=(Step(left=x, operator="*", right=y), Step(left=None, operator="-", right=z)),
    )


def _buys_and_gives_away(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    z = rng.randint(1, min(MAX_ADDEND, x + y - 1))
    question = (
        f"{one} has {x} {things} and buys {y} more. Then {one} gives {z} {things} to {other}. How "
        f"many {things} does {one} have left?"
    )
    return Problem(
        question=question,
        steps=(Step(left=x, operator="+", right=y), Step(left=None, operator="-", right=z)),
    )


def _has_more_than(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, y = _addend(rng), _addend(rng)
    question = (
        f"{one} has {x} {things}. {other} has {y} more {things} than {one}. How many {things} do "
        "they have together?"
    )
    return Problem(
        question=question,
        steps=(Step(left=x, operator="+", right=y), Step(left=x, operator="+", right=None)),
    )


def _has_times_as_many(rng: random.Random, one: str, other: str, things: str) -> Problem:
    x, times = _addend(rng), rng.randint(2, 3)
    question = (
        f"{one} has {x} {things}. {other} has {times} times as many {things} as {one}. How many "
        f"{things} do they have together?"
    )
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

_EVENTS: dict[Operator, tuple[str, ...]] = {
    "+": (
        "{one} buys {number} more {things}.",
        "{one} finds {number} {things}.",
        "{other} gives {one} {number} {things}.",
    ),
    "-": (
        "{one} loses {number} {things}.",
        "{one} sells {number} {things}.",
        "{one} gives {other} {number} {things}.",
    ),
    "*": ("Soon {one} has {number} times as many {things}.",),
}
"""Sentences about the events of a long problem, by what they do to the number of items."""
