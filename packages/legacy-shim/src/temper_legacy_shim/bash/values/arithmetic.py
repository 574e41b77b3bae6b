"""Evaluate bash's arithmetic on 64-bit integers; unknown values make the result unknown."""

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#[0-9A-Za-z@_]+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*(?:\[[^\]]*\])?)"
    r"|(?P<operator>\*\*|<<=|>>=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
# From loose to tight, in the order of C; ** binds tighter than all of them.
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<=", ">=", "<", ">"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_LEVEL_OF = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators}
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_MAX_DEPTH = 30


class UnknownNumber(Exception):
    """A name in the expression is unknown."""


class BadExpression(Exception):
    """Bash would refuse the expression: a syntax error, a division by zero."""


def calculate(
    text: str,
    *,
    read: Callable[[str], str | None],
    write: Callable[[str, str], None],
    depth: int = 0,
) -> int:
    """Return the value of an expression whose ``$`` expansions are done.

    Args:
        text: the expression.
        read: returns the text of a variable, None if it is unset; raises UnknownNumber.
        write: assigns a variable.
        depth: how many variables whose value is an expression led here.

    Raises:
        UnknownNumber: see `read`.
        BadExpression: see there.
    """
    if depth > _MAX_DEPTH or len(text) > 10_000:
        raise BadExpression("too deep")
    if not text.strip():
        return 0
    calculation = _Calculation(_tokens(text), read, write, depth)
    value = calculation.comma()
    if calculation.at != len(calculation.tokens):
        raise BadExpression(text)
    return value


def _tokens(text: str) -> list[tuple[str, str]]:
    out, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadExpression(text)
        assert match.lastgroup is not None
        out.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return out


class _Calculation:
    """Recursive descent over the tokens; `is_live` is False in the branch that is not taken."""

    def __init__(
        self,
        tokens: list[tuple[str, str]],
        read: Callable[[str], str | None],
        write: Callable[[str, str], None],
        depth: int,
    ) -> None:
        self.tokens, self.at, self.read, self.write, self.depth = tokens, 0, read, write, depth
        self.is_live = True
        self.levels = 0

    def peek(self) -> str:
        return (
            self.tokens[self.at][1]
            if self.at < len(self.tokens) and self.tokens[self.at][0] == "operator"
            else ""
        )

    def take(self, *operators: str) -> str:
        result = self.peek()
        if result and result in operators:
            self.at += 1
            return result
        return ""

    def comma(self) -> int:
        value = self.assignment()
        while self.take(","):
            value = self.assignment()
        return value

    def assignment(self) -> int:
        self.levels += 1
        if self.levels > _MAX_DEPTH:
            raise BadExpression("too deep")
        try:
            if (
                self.at + 1 < len(self.tokens)
                and self.tokens[self.at][0] == "name"
                and self.tokens[self.at + 1][1] in _ASSIGNING
            ):
                name, operator = self.tokens[self.at][1], self.tokens[self.at + 1][1]
                self.at += 2
                value = self.assignment()
                if operator != "=":
                    value = self.binary(operator[:-1], self.variable(name), value)
                return self.assign(name, value)
            return self.ternary()
        finally:
            self.levels -= 1

    def ternary(self) -> int:
        condition = self.level(0)
        if not self.take("?"):
            return condition
        was_live = self.is_live
        self.is_live = was_live and condition != 0
        first = self.assignment()
        if not self.take(":"):
            raise BadExpression("? without :")
        self.is_live = was_live and condition == 0
        second = self.assignment()
        self.is_live = was_live
        return first if condition else second

    def level(self, number: int) -> int:
        """Return the operators of this level and tighter ones, from the left."""
        value = self.power()
        while (operator := self.peek()) in _LEVEL_OF and _LEVEL_OF[operator] >= number:
            self.at += 1
            was_live = self.is_live
            # Bash leaves the right side out if the left one decides: $((x && (y = 1))).
            if operator in ("&&", "||"):
                self.is_live = was_live and bool(value) == (operator == "&&")
            right = self.level(_LEVEL_OF[operator] + 1)
            self.is_live = was_live
            value = self.binary(operator, value, right)
        return value

    def power(self) -> int:
        value = self.unary()
        if self.take("**"):
            self.levels += 1
            if self.levels > _MAX_DEPTH:
                raise BadExpression("too deep")
            exponent = self.power()
            self.levels -= 1
            if exponent < 0:
                raise BadExpression("exponent less than 0")
            # The modulus keeps 9 ** 9 ** 9 small, which bash cuts to 64 bits as well.
            return _wrapped(pow(value, exponent, 1 << 64))
        return value

    def unary(self) -> int:
        signs = []
        while operator := self.take("!", "~", "-", "+", "++", "--"):
            signs.append(operator)
        if (
            signs
            and signs[-1] in ("++", "--")
            and self.at < len(self.tokens)
            and self.tokens[self.at][0] == "name"
        ):
            name = self.tokens[self.at][1]
            self.at += 1
            value = self.assign(name, self.variable(name) + (1 if signs.pop() == "++" else -1))
        else:
            value = self.primary()
        for operator in reversed(signs):
            value = {"!": int(not value), "~": ~value, "-": -value}.get(operator, value)
        return _wrapped(value)

    def primary(self) -> int:
        if self.take("("):
            value = self.comma()
            if not self.take(")"):
                raise BadExpression("( without )")
            return value
        if self.at >= len(self.tokens):
            raise BadExpression("an operand is missing")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _wrapped(_number(text))
        if kind != "name":
            raise BadExpression(text)
        value = self.variable(text)
        if operator := self.take("++", "--"):
            self.assign(text, value + (1 if operator == "++" else -1))
        return value

    def variable(self, name: str) -> int:
        if not self.is_live:
            return 0
        # The value of a variable is an expression of its own: x=y+1; $((x)).
        text = self.read(name)
        if text is None or not text.strip():
            return 0
        return calculate(text, read=self.read, write=self.write, depth=self.depth + 1)

    def assign(self, name: str, value: int) -> int:
        value = _wrapped(value)
        if self.is_live:
            self.write(name, str(value))
        return value

    def binary(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%"):
            if right == 0:
                if self.is_live:
                    raise BadExpression("division by 0")
                return 0
            # C rounds towards 0, Python down.
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return _wrapped(quotient if operator == "/" else left - right * quotient)
        return _wrapped(_OPERATIONS[operator](left, right))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<<": lambda a, b: a << (b & 63),
    ">>": lambda a, b: a >> (b & 63),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def _number(text: str) -> int:
    try:
        if "#" in text:
            base, _, digits = text.partition("#")
            return _convert_base(int(base), digits)
        if text[:2] in ("0x", "0X"):
            return int(text, 16)
        # A leading 0 means octal, so that 08 is an error in bash, too.
        return int(text, 8) if text.startswith("0") and len(text) > 1 else int(text)
    except ValueError as error:
        raise BadExpression(text) from error


def _convert_base(base: int, digits: str) -> int:
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
    value = 0
    # Up to base 36 capital letters are the same digits as small ones.
    for digit in digits.lower() if base <= 36 else digits:
        position = alphabet.find(digit)
        if not 2 <= base <= 64 or not 0 <= position < base:
            raise BadExpression(digits)
        value = value * base + position
    return value


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
