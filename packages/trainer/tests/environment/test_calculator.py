"""Arithmetic with bounds."""

import pytest

from temper_trainer.environment.calculator import CalculationError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*4", "8"),
        (" 8-6 ", "2"),
        ("7/2", "3.5"),
        ("-(3+4)//2", "-4"),
        ("2**10", "1024"),
        ("1,200*2", "2400"),
        ("0.1+0.2", "0.3"),
        ("6/3", "2"),
    ],
)
def test_expressions_have_the_expected_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("1/0", "division by zero"),
        ("__import__('os')", "not an arithmetic expression"),
        ("a+1", "not an arithmetic expression"),
        ("", "1 to 200 characters"),
        ("9**9**9", "too large"),
        ("9" * 99 + "*9", "too large"),
        ("True+1", "not an arithmetic expression"),
    ],
)
def test_invalid_expression_is_refused_with_the_reason(expression: str, sentence: str) -> None:
    with pytest.raises(CalculationError, match=sentence):
        calculate(expression)
