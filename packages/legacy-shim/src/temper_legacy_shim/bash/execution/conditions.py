"""Evaluate ``test``, ``[ ... ]`` and ``[[ ... ]]``: true, false, or unknown until a run."""

import re

from temper_legacy_shim.bash.syntax.syntax_tree import Test, Word
from temper_legacy_shim.bash.values import expansion, parameters
from temper_legacy_shim.bash.values.arithmetic import BadExpression, UnknownNumber
from temper_legacy_shim.bash.values.patterns import TooMuch, compiled, matches
from temper_legacy_shim.bash.values.shell_state import Shell
from temper_legacy_shim.bash.values.shell_values import Field, Piece, Text, Truth, Variable, literal

_COMPARING = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_BINARY = ("=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef", *_COMPARING)
_FILE_TESTS = frozenset("-" + letter for letter in "abcdefghkprstuwxGLNOS")
_SLOW = re.compile(r"[*+}?]\)[*+{?]|\([^)]*\|[^)]*\)[*+{]")
_MAX_DEPTH = 30


class Malformed(Exception):
    """Bash would refuse the test, with status 2."""


def test_fields(shell: Shell, fields: list[Field]) -> Truth:
    """Evaluate ``test`` and ``[`` with expanded arguments.

    Raises:
        Malformed: see there.
    """
    texts = [field.text for field in fields]
    if not texts:
        return Truth(False)
    parser = _FieldParser(shell, texts)
    truth = parser.either(0)
    if parser.at != len(texts):
        raise Malformed
    return truth


class _FieldParser:
    """The grammar of ``[``: the number of arguments determines which words are operators."""

    def __init__(self, shell: Shell, texts: list[Text]) -> None:
        self.shell, self.texts, self.at = shell, texts, 0

    def word(self, ahead: int = 0) -> str | None:
        index = self.at + ahead
        return self.texts[index].known if index < len(self.texts) else None

    def either(self, depth: int) -> Truth:
        truth = self.both(depth)
        while self.word() == "-o":
            self.at += 1
            truth = truth | self.both(depth)
        return truth

    def both(self, depth: int) -> Truth:
        truth = self.one(depth)
        while self.word() == "-a":
            self.at += 1
            truth = truth & self.one(depth)
        return truth

    def one(self, depth: int) -> Truth:
        left = len(self.texts) - self.at
        if left <= 0 or depth > _MAX_DEPTH:
            raise Malformed
        # An operator in the middle comes first, so that [ ! = x ] compares, as POSIX says.
        if left >= 3 and self.word(1) in _BINARY:
            first, operator, second = self.texts[self.at], self.word(1), self.texts[self.at + 2]
            self.at += 3
            assert operator is not None
            return binary(self.shell, operator, first, second)
        if left >= 2 and self.word() == "!":
            self.at += 1
            return ~self.one(depth + 1)
        if left >= 3 and self.word() == "(":
            self.at += 1
            truth = self.either(depth + 1)
            if self.word() != ")":
                raise Malformed
            self.at += 1
            return truth
        operator = self.word()
        if (
            left >= 2
            and operator is not None
            and (operator in _FILE_TESTS or operator in ("-z", "-n", "-v", "-o"))
        ):
            self.at += 2
            return unary(self.shell, operator, self.texts[self.at - 1])
        self.at += 1
        return unary(self.shell, "-n", self.texts[self.at - 1])


def unary(shell: Shell, operator: str, text: Text) -> Truth:
    """Evaluate ``-z x``, ``-n x``, ``-f x`` and other unary tests."""
    if operator in ("-z", "-n"):
        if any(piece.is_known and piece.value for piece in text.pieces):
            is_empty: bool | None = False
        elif text.is_known or text.is_unset:
            is_empty = True
        else:
            is_empty = (
                None if any(piece.value.startswith(("$(", "`")) for piece in text.pieces) else False
            )
        # A variable with the output of a command counts as filled, but that is an assumption:
        # a loop that waits until such a variable is empty is read for one round, not for all.
        is_assumed = is_empty is False and any(map(_is_output, text.pieces))
        return Truth(
            is_empty if operator == "-z" or is_empty is None else not is_empty,
            is_assumed=text.is_unset or is_assumed,
        )
    if operator == "-v":
        name = text.known
        if name is None:
            return Truth(None)
        variable: Variable | None = shell.find(name.partition("[")[0])
        if variable is None and not shell.is_assigned(name):
            return Truth(False, is_assumed=True)
        return Truth(
            variable is not None and (variable.elements is not None or variable.text is not None)
        )
    if text.is_known and not text.shown():
        return Truth(False)
    if text.is_unset and not text.if_unset():
        return Truth(False, is_assumed=True)
    return Truth(None)


def _is_output(piece: Piece) -> bool:
    """Return True for a variable that holds nothing but the output of commands."""
    is_own = piece.value.startswith(("$(", "`"))
    return not piece.is_known and (
        is_own or (bool(piece.inner) and all(map(_is_output, piece.inner)))
    )


def binary(shell: Shell, operator: str, left: Text, right: Text) -> Truth:
    """Evaluate ``a = b``, ``a -lt b`` and other tests of two values."""
    is_assumed = left.is_unset or right.is_unset
    if not all(text.is_known or text.is_unset for text in (left, right)):
        if operator in ("=", "==", "!=") and left.shown() == right.shown():
            return Truth(operator != "!=")
        return Truth(None)
    first, second = left.if_unset(), right.if_unset()
    if operator in _COMPARING:
        return _compared(shell, operator, first, second, is_assumed=is_assumed)
    if operator in ("=", "==", "!="):
        return Truth((first == second) == (operator != "!="), is_assumed)
    if operator in ("<", ">"):
        return Truth(first < second if operator == "<" else first > second, is_assumed)
    return Truth(None)


def _compared(shell: Shell, operator: str, first: str, second: str, *, is_assumed: bool) -> Truth:
    try:
        a, b = (parameters.calculate_number(shell, text) for text in (first, second))
    except UnknownNumber:
        return Truth(None)
    except BadExpression:
        return Truth(False, is_assumed)
    if is_assumed and not (first.strip() and second.strip()):
        # An empty operand is an error of `[`, which counts as false.
        return Truth(False, is_assumed)
    answer = {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[
        _COMPARING[operator]
    ]
    return Truth(answer, is_assumed)


def test_words(shell: Shell, test: Test) -> Truth:
    """Evaluate ``[[ ... ]]``.

    Raises:
        Malformed: see there.
    """
    parser = _WordParser(shell, test.tokens)
    truth = parser.either(0)
    if parser.at != len(test.tokens):
        raise Malformed
    return truth


class _WordParser:
    """The grammar of ``[[``."""

    def __init__(self, shell: Shell, tokens: tuple[str | Word, ...]) -> None:
        self.shell, self.tokens, self.at = shell, tokens, 0

    def peek(self, ahead: int = 0) -> str | Word | None:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def either(self, depth: int) -> Truth:
        truth = self.both(depth)
        while self.peek() == "||":
            self.at += 1
            other = self.both(depth)
            truth = truth | other
        return truth

    def both(self, depth: int) -> Truth:
        truth = self.one(depth)
        while self.peek() == "&&":
            self.at += 1
            other = self.one(depth)
            truth = truth & other
        return truth

    def one(self, depth: int) -> Truth:
        token = self.peek()
        if token is None or depth > _MAX_DEPTH:
            raise Malformed
        if token == "!":
            self.at += 1
            return ~self.one(depth + 1)
        if token == "(":
            self.at += 1
            truth = self.either(depth + 1)
            if self.peek() != ")":
                raise Malformed
            self.at += 1
            return truth
        if isinstance(token, str):
            raise Malformed
        literal_text = token.literal()
        following = self.peek(1)
        if (
            literal_text is not None
            and isinstance(following, Word)
            and (literal_text in _FILE_TESTS or literal_text in ("-z", "-n", "-v"))
        ):
            self.at += 2
            return unary(self.shell, literal_text, expansion.expand_text(self.shell, following))
        operator = (
            following
            if isinstance(following, str)
            else following.literal()
            if isinstance(following, Word)
            else None
        )
        right = self.peek(2)
        if operator in _BINARY and isinstance(right, Word):
            self.at += 3
            return self.compare(operator, token, right)
        self.at += 1
        return unary(self.shell, "-n", expansion.expand_text(self.shell, token))

    def compare(self, operator: str, first: Word, second: Word) -> Truth:
        left = expansion.expand_text(self.shell, first)
        if operator in _COMPARING or operator not in ("=", "==", "!=", "=~"):
            return binary(self.shell, operator, left, expansion.expand_text(self.shell, second))
        pieces, is_known, is_unset = expansion.expand_pattern(self.shell, second)
        if not (left.is_known or left.is_unset) or not (is_known or is_unset):
            return Truth(None)
        is_assumed = left.is_unset or not is_known
        try:
            if operator == "=~":
                return Truth(self.searched(pieces, left.if_unset()), is_assumed)
            return Truth(
                matches(compiled(pieces), left.if_unset()) == (operator != "!="), is_assumed
            )
        except TooMuch:
            return Truth(None)

    def searched(self, pieces: list[tuple[str, bool]], text: str) -> bool:
        """Evaluate ``=~`` and set BASH_REMATCH to its groups."""
        expression = "".join(re.escape(part) if is_quoted else part for part, is_quoted in pieces)
        expression = re.sub(
            r"\[\[:(alpha|digit|alnum|space|upper|lower):\]\]",
            lambda match: _CLASSES[match[1]],
            expression,
        )
        if len(text) > 500 or len(expression) > 200 or _SLOW.search(expression):
            raise TooMuch
        try:
            match = re.search(expression, text)
        except re.error as error:
            raise TooMuch from error
        if match is None:
            return False
        groups = [match[0], *(group or "" for group in match.groups())]
        fields: dict[int | str, Field] = {
            number: Field(literal(group), literal(group).raw())
            for number, group in enumerate(groups)
        }
        self.shell.scopes[0]["BASH_REMATCH"] = Variable(elements=fields)
        return True


_CLASSES = {
    "alpha": "[A-Za-z]",
    "digit": "[0-9]",
    "alnum": "[A-Za-z0-9]",
    "space": r"\s",
    "upper": "[A-Z]",
    "lower": "[a-z]",
}
