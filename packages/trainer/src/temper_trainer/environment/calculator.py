"""A calculator with limits on the length of expressions and on the size of results."""

import ast
import math
import operator
from collections.abc import Callable

MAX_LENGTH = 200
"""Largest number of characters of an expression."""
MAX_EXPONENT = 1024
"""Largest exponent of a power: computing a larger one could take minutes."""
MAX_DIGITS = 60
"""Largest number of digits of an integer result."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class CalculationError(ValueError):
    """An expression has no value; the policy reads the message."""


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses, as text.

    Raises:
        CalculationError: If it is not such an expression, is too long, divides by zero, or if its
            value is too large.
    """
    # Models write thousands separators and the signs of mathematics.
    text = expression.strip().replace(",", "").replace("×", "*").replace("^", "**")
    if not text or len(text) > MAX_LENGTH:
        raise CalculationError(f"an expression has 1 to {MAX_LENGTH} characters")
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise CalculationError("not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except OverflowError as error:
        raise CalculationError("the value is too large") from error
    return _format(value)


def _evaluate(node: ast.expr) -> int | float:
    # isinstance would accept True, which is an int.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (
            abs(right) > MAX_EXPONENT or abs(left) > 10**MAX_DIGITS
        ):
            raise CalculationError("the value is too large")
        result = _BINARY[type(node.op)](left, right)
        # A negative number to a fractional power is complex.
        if isinstance(result, complex) or (
            isinstance(result, int) and abs(result) >= 10**MAX_DIGITS
        ):
            raise CalculationError("the value is too large or not real")
        return result
    raise CalculationError("not an arithmetic expression")


def _format(value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise CalculationError("the value is too large")
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.10g}"
