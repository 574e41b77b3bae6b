"""The reward functions that come with the package."""

import threading

import pytest

from temper_trainer.reward.builtin_rewards import (
    exact_match,
    gsm8k_flexible,
    gsm8k_strict,
    math_verify,
)
from temper_trainer.types import Prompt


def make_prompt(answer: str) -> Prompt:
    return Prompt(prompt_id=3, text="?", tokens=(1,), answer=answer, location="file:3")


@pytest.mark.parametrize(
    ("answer", "completion", "strict", "flexible"),
    [
        ("6*4=24\n#### 24", "6*4=24\n#### 24", 1, 1),
        ("#### 24", "#### 24\n", 1, 1),
        ("#### 1,234", "#### 1234", 1, 1),
        ("#### 1234", "#### $1,234.00", 1, 1),
        ("#### -5", "#### -5", 1, 1),
        ("#### 0.5", "#### .50", 1, 1),
        ("24", "#### 24.", 1, 1),
        ("#### 24", "the answer is 24.", 0, 1),
        ("#### 24", "#### 24\nor was it 25?", 0, 0),
        ("#### 24", "#### 25\n24", 0, 1),
        ("#### 24", "#### 240", 0, 0),
        ("#### 24", "#### 2 4", 0, 0),
        ("#### 24", "so #### 24", 0, 1),
        ("#### 24", "####", 0, 0),
        ("#### 24", "", 0, 0),
    ],
)
def test_gsm8k_strict_reads_the_last_line_and_flexible_the_last_number(
    answer: str, completion: str, strict: float, flexible: float
) -> None:
    assert gsm8k_strict(make_prompt(answer), completion) == strict
    assert gsm8k_flexible(make_prompt(answer), completion) == flexible


def test_reference_that_is_not_a_number_raises() -> None:
    for function in (gsm8k_strict, gsm8k_flexible):
        with pytest.raises(
            ValueError, match=r"prompt 3 \(file:3\) is 'many', but must be a number"
        ):
            function(make_prompt("#### many"), "#### 1")


def test_exact_match_ignores_only_white_space_at_the_ends() -> None:
    assert exact_match(make_prompt("a b"), " a b\n") == 1
    assert exact_match(make_prompt("a b"), "a  b") == 0


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("#### 72", "The answer is 72.", 1),
        ("1,000", "#### 1000", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        ("x^2 + 1", "$1 + x^2$", 1),
        ("72", "The answer is 27.", 0),
        ("72", "no idea", 0),
    ],
)
def test_math_verify_recognizes_equal_expressions_in_a_thread(
    answer: str, completion: str, expected: float
) -> None:
    """Check that the library's own timeouts are off, which fail outside the main thread."""
    pytest.importorskip("math_verify", reason="needs the extra temper-trainer[math]")
    rewards: list[float] = []
    thread = threading.Thread(
        target=lambda: rewards.append(math_verify(make_prompt(answer), completion))
    )
    thread.start()
    thread.join()
    assert rewards == [expected]


def test_math_verify_refuses_a_reference_that_it_cannot_read() -> None:
    pytest.importorskip("math_verify", reason="needs the extra temper-trainer[math]")
    with pytest.raises(ValueError, match="math-verify cannot parse"):
        math_verify(make_prompt("####"), "1")
