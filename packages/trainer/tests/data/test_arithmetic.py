"""The generated word problems."""

import random
import re
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import ArithmeticSource
from temper_trainer.data.arithmetic import (
    Step,
    draw_long_problem,
    draw_problem,
    generate_arithmetic_rows,
    is_test_question,
    replace_first_operation,
    solve,
)

EQUATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


def source(
    num_rows: int, *, split: Literal["train", "test"] = "train", seed: int = 0, wrong: float = 0.0
) -> ArithmeticSource:
    return ArithmeticSource(max_rows=num_rows, split=split, seed=seed, wrong_first_operation=wrong)


def check_text(text: str) -> int:
    """Check every line of an answer text with Python's arithmetic, and return its final number."""
    *lines, final = text.split("\n")
    for line in lines:
        equation = EQUATION.fullmatch(line)
        assert equation is not None, text
        left, operator, right, result = equation.groups()
        assert (
            {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
                operator
            ]
            == int(result)
            > 0
        )
    assert final == f"#### {lines[-1].partition('=')[2]}"
    return int(final.removeprefix("#### "))


def test_example_problem_is_solved_step_by_step() -> None:
    # 6 boxes of 4 pens are 24, and 3 more are 27.
    steps = (Step(left=6, operator="*", right=4), Step(left=None, operator="+", right=3))
    assert solve(steps) == "6*4=24\n24+3=27\n#### 27"
    # With + in place of *: 6 + 4 = 10, and 3 more are 13.
    assert solve(replace_first_operation(steps)) == "6+4=10\n10+3=13\n#### 13"


def test_wrong_first_operation_never_falls_below_one() -> None:
    # 3 + 5 can't become 3 - 5, so it becomes 3 * 5; 7 + 2 becomes 7 - 2 = 5, from which 6 can't be
    # taken, so 6 is added.
    assert (
        solve(replace_first_operation((Step(left=3, operator="+", right=5),))) == "3*5=15\n#### 15"
    )
    steps = (Step(left=7, operator="+", right=2), Step(left=None, operator="-", right=6))
    assert solve(replace_first_operation(steps)) == "7-2=5\n5+6=11\n#### 11"


@given(seed=st.integers(0, 2**32))
def test_every_answer_text_is_right_and_every_wrong_one_is_consistent(seed: int) -> None:
    problem = draw_problem(random.Random(seed))
    assert 1 <= check_text(solve(problem.steps)) <= 40  # at most 10 + 3 * 10, or 10 + 20
    wrong = replace_first_operation(problem.steps)
    check_text(solve(wrong))
    assert wrong[0].operator != problem.steps[0].operator


@given(seed=st.integers(0, 2**32), num_operations=st.integers(1, 12))
def test_long_problem_has_one_operation_per_event(seed: int, num_operations: int) -> None:
    problem = draw_long_problem(random.Random(seed), num_operations=num_operations)
    check_text(solve(problem.steps))
    check_text(solve(replace_first_operation(problem.steps)))
    first, *events, last = re.split(r"(?<=\.) ", problem.question)
    number = int(re.findall(r"\d+", first)[0])
    assert problem.steps[0].left == number
    for event, step in zip(events, problem.steps, strict=True):
        change = int(re.findall(r"\d+", event)[0])
        one = first.split()[0]
        if "times" in event:
            assert step.operator == "*"
            number *= change
        elif event.startswith((f"{one} loses", f"{one} sells", f"{one} gives")):
            assert step.operator == "-"
            number -= change
        else:
            assert step.operator == "+"
            number += change
    assert solve(problem.steps).endswith(f"#### {number}")
    assert last.startswith("How many")


def test_max_operations_bounds_the_operations_of_problems() -> None:
    rows = generate_arithmetic_rows(
        ArithmeticSource(
            max_rows=400, max_operations=6, difficulty_key="operations", category_key="operations"
        )
    )
    counts = Counter(row.difficulty for row in rows)
    assert set(counts) == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    # 400 draws of six: 67 each, with a standard deviation of 7.5.
    assert all(30 < count < 105 for count in counts.values())
    assert {row.category for row in rows} == {"one", "two", "more"}
    with pytest.raises(ConfigError, match="max_operations of ArithmeticSource is 1, but must be"):
        ArithmeticSource(max_rows=4, max_operations=1)


def test_train_and_test_questions_are_disjoint_for_all_seeds() -> None:
    train = {
        row.prompt for seed in range(3) for row in generate_arithmetic_rows(source(500, seed=seed))
    }
    test = {
        row.prompt
        for seed in range(3)
        for row in generate_arithmetic_rows(source(200, split="test", seed=seed))
    }
    assert not train & test
    assert all(isinstance(question, str) and is_test_question(question) for question in test)


def test_rows_are_a_function_of_the_seed_and_all_different() -> None:
    rows = generate_arithmetic_rows(source(300, seed=5))
    assert rows == generate_arithmetic_rows(source(300, seed=5))
    assert rows[:100] == generate_arithmetic_rows(source(100, seed=5))
    assert {row.prompt for row in rows}.isdisjoint(
        row.prompt for row in generate_arithmetic_rows(source(50, seed=6))
    )
    assert len({row.prompt for row in rows}) == 300


def test_fraction_of_wrong_demonstrations_does_not_change_questions_and_answers() -> None:
    right, half = (
        generate_arithmetic_rows(source(1000)),
        generate_arithmetic_rows(source(1000, wrong=0.5)),
    )
    assert [(row.prompt, row.answer) for row in right] == [(row.prompt, row.answer) for row in half]
    assert all(row.solution == row.answer for row in right)
    # 1000 fair coins: six standard deviations of sqrt(1000 / 4) = 15.8 are 95.
    assert 405 < sum(row.solution != row.answer for row in half) < 595


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows of ArithmeticSource is 0, but must be"):
        source(0)
