"""Split text into words: quoting, escapes, expansions, and word boundaries."""

import re
from collections.abc import Callable

from temper_legacy_shim.bash.syntax.syntax_tree import (
    Arithmetic,
    DoubleQuoted,
    Literal,
    Parameter,
    Part,
    Program,
    Span,
    Substitution,
    Word,
)
from temper_legacy_shim.errors import ScriptError

METACHARACTERS = " \t\n;&|<>()"
MAX_NESTING = 40
"""Levels of expansions and compound commands; no person writes more."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,|@[A-Za-z]|:")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "v": "\v",
}
_PLAIN = re.compile(r"[A-Za-z0-9_.=]+")
"""Characters that neither end nor open anything, wherever they stand."""
_NUMBERED_ESCAPE = re.compile(
    r"x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})"
)


class Words:
    """A text, a place in it, and the words that start there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.nesting = 0

    def program_until(self, end: str) -> Program:
        """Return the commands up to the closing text of a substitution, which is consumed."""
        raise NotImplementedError

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def error(self, what: str, at: int | None = None) -> ScriptError:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return ScriptError(f"line {line}: {what}")

    def nest(self) -> None:
        """Enter one level of nesting; the caller leaves it with ``self.nesting -= 1``."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise self.error(
                f"more than {MAX_NESTING} expansions or commands inside each other: write it "
                "flatter."
            )

    def word(self, is_end: Callable[[str], bool] | None = None) -> Word:
        """Return one word from here; empty if none starts."""
        start = self.at
        parts = self._parts(is_end or METACHARACTERS.__contains__, in_quotes=False)
        return Word(parts=parts, source=self.text[start : self.at], span=Span(start, self.at))

    def heredoc_body(self) -> Word:
        """Return the full text as the body of a heredoc whose delimiter is not quoted."""
        parts = self._parts(lambda _: False, in_quotes=True, has_quote_marks=False)
        return Word(parts=parts, source=self.text, span=Span(0, len(self.text)))

    def _parts(
        self, is_end: Callable[[str], bool], *, in_quotes: bool, has_quote_marks: bool = True
    ) -> tuple[Part, ...]:
        """Return the parts up to a character that ends them, which is left, or the end of the text.

        Args:
            is_end: asked about characters that are not quoted.
            in_quotes: inside double quotes, where single quotes and most backslashes are
                characters.
            has_quote_marks: whether ``"`` opens a quoted part; in a heredoc it is a character.
        """
        parts: list[Part] = []
        while self.at < len(self.text):
            run = _PLAIN.match(self.text, self.at)
            if run is not None:
                self.at = run.end()
                parts.append(Literal(run[0], is_quoted=in_quotes))
                continue
            char = self.text[self.at]
            # A process substitution starts with a character that ends a word elsewhere.
            if is_end(char) and not (char in "<>" and self.peek(2) in ("<(", ">(")):
                break
            if char == "\\":
                parts.append(self._escape(in_quotes=in_quotes, escapes_quote=has_quote_marks))
            elif char == '"' and has_quote_marks:
                parts.append(self._double_quoted())
            elif char == "'" and not in_quotes:
                parts.append(self._single_quoted())
            elif char == "$":
                parts.append(self._dollar(in_quotes=in_quotes))
            elif char == "`":
                parts.append(self._backquoted())
            elif not in_quotes and self.peek(2) in ("<(", ">("):
                parts.append(self._substitution(opening=2, is_process=True))
            else:
                self.at += 1
                parts.append(Literal(char, is_quoted=in_quotes))
        return _joined(parts)

    def _escape(self, *, in_quotes: bool, escapes_quote: bool) -> Literal:
        self.at += 1
        char = self.peek()
        if char == "\n":
            self.at += 1
            return Literal("", is_quoted=in_quotes)
        # Inside double quotes a backslash before a plain character is literal.
        if in_quotes and char not in ('$`"\\' if escapes_quote else "$`\\"):
            return Literal("\\", is_quoted=True)
        self.at += len(char)
        return Literal(char, is_quoted=bool(char))

    def _single_quoted(self) -> Literal:
        # No escapes exist inside single quotes.
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.error("a single quote is opened here and never closed.")
        text, self.at = self.text[self.at + 1 : end], end + 1
        return Literal(text, is_quoted=True)

    def _double_quoted(self) -> DoubleQuoted:
        start = self.at
        self.nest()
        self.at += 1
        parts = self._parts('"'.__eq__, in_quotes=True)
        self.nesting -= 1
        if self.peek() != '"':
            raise self.error("a double quote is opened here and never closed.", start)
        self.at += 1
        return DoubleQuoted(parts or (Literal("", is_quoted=True),))

    def _ansi_quoted(self) -> Literal:
        """Read ``$'...'`` after the opening quote."""
        start, out = self.at, []
        self.at += 1
        while (char := self.peek()) != "'":
            if not char:
                raise self.error("$' is opened here and never closed.", start)
            self.at += 1
            if char != "\\":
                out.append(char)
            elif match := _NUMBERED_ESCAPE.match(self.text, self.at):
                self.at = match.end()
                number = (
                    int(match[4], 8) & 0xFF
                    if match[4]
                    else int(match[1] or match[2] or match[3], 16)
                )
                out.append(
                    chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else ""
                )
            else:
                escaped = self.peek()
                self.at += len(escaped)
                out.append(
                    _ESCAPES.get(escaped, escaped if escaped in "\\'\"?" else "\\" + escaped)
                )
        self.at += 1
        # An argument cannot contain NUL, and bash ends the text there.
        return Literal("".join(out).partition("\0")[0], is_quoted=True)

    def _dollar(self, *, in_quotes: bool) -> Part:
        following = self.text[self.at + 1 : self.at + 3]
        if following.startswith("{"):
            return self._braced(in_quotes=in_quotes)
        if following == "((":
            arithmetic = self._arithmetic()
            if arithmetic is not None:
                return arithmetic
        if following.startswith("("):
            return self._substitution(opening=2)
        if following.startswith("[") and (old := self._old_arithmetic()) is not None:
            return old
        if not in_quotes and following.startswith("'"):
            self.at += 1
            return self._ansi_quoted()
        if not in_quotes and following.startswith('"'):
            self.at += 1
            return self._double_quoted()
        start = self.at
        # Without braces a positional parameter has one digit: $10 is ${1}0.
        match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]").match(self.text, self.at + 1)
        if match is None:
            self.at += 1
            return Literal("$", is_quoted=in_quotes)
        self.at = match.end()
        return Parameter(match[0], self.text[start : self.at])

    def _substitution(self, *, opening: int, is_process: bool = False) -> Substitution:
        start = self.at
        self.nest()
        self.at += opening
        program = self.program_until(")")
        self.nesting -= 1
        return Substitution(program, self.text[start : self.at], is_process)

    def _backquoted(self) -> Substitution:
        start = self.at
        match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self.error("a backquote is opened here and never closed.")
        self.nest()
        # Inside backquotes, a backslash escapes only these three characters.
        inside = type(self)(re.sub(r"\\([$`\\])", r"\1", match[1]))
        inside.nesting = self.nesting
        program = inside.program_until("")
        self.nesting -= 1
        self.at = match.end()
        return Substitution(program, self.text[start : self.at])

    def _arithmetic(self) -> Arithmetic | None:
        """Return ``$((...))``; None if it is a substitution that begins with a subshell."""
        start = self.at
        self.at += 3
        expression = self.calculation()
        # `$((` also starts a substitution with a subshell; bash decides by the closing parentheses
        # too.
        if expression is None:
            self.at = start
            return None
        return Arithmetic(expression, self.text[start : self.at])

    def calculation(self) -> Word | None:
        """Consume ``((...))`` and return its inside; None if it does not end so."""
        start, depth = self.at, 0

        def is_end(char: str) -> bool:
            nonlocal depth
            if char == ")" and depth == 0:
                return True
            depth += (char == "(") - (char == ")")
            return False

        self.nest()
        parts = self._parts(is_end, in_quotes=True)
        self.nesting -= 1
        word = Word(parts=parts, source=self.text[start : self.at], span=Span(start, self.at))
        if self.peek(2) != "))":
            return None
        self.at += 2
        return word

    def _old_arithmetic(self) -> Arithmetic | None:
        """Read ``$[...]``."""
        start = self.at
        self.at += 2
        inside = self.at
        parts = self._parts("]".__eq__, in_quotes=True)
        if self.peek() != "]":
            self.at = start
            return None
        word = Word(parts=parts, source=self.text[inside : self.at], span=Span(inside, self.at))
        self.at += 1
        return Arithmetic(word, self.text[start : self.at])

    def _braced(self, *, in_quotes: bool) -> Parameter:
        """Read ``${...}``."""
        start = self.at
        self.at += 2
        prefix = ""
        # In ${#} and ${!} the character is the parameter itself and not a prefix.
        if self.peek() in ("#", "!") and self.text[self.at + 1 : self.at + 2] not in ("}", ":", ""):
            prefix = self.peek()
            self.at += 1
        match = _PARAMETER.match(self.text, self.at)
        if match is None:
            return self._bad_substitution(start)
        self.at = match.end()
        index = self._subscript() if self.peek() == "[" else None
        operator = ""
        if prefix == "!" and self.peek() in ("*", "@"):
            self.at += 1
            operator = "names"
        elif self.peek() != "}":
            result = _OPERATOR.match(self.text, self.at)
            if result is None:
                return self._bad_substitution(start)
            operator, self.at = result[0], result.end()
        self.nest()
        operands = self._operands(operator, in_quotes=in_quotes)
        self.nesting -= 1
        if self.peek() != "}":
            raise self.error("${ is opened here and never closed.", start)
        self.at += 1
        if prefix == "#":
            operator = "len" if not operator else "bad"
        elif prefix == "!" and index is not None and index.literal() in ("@", "*") and not operator:
            operator = "keys"
        is_indirect = prefix == "!" and operator not in ("keys", "names")
        return Parameter(
            match[0], self.text[start : self.at], index, operator, operands, is_indirect
        )

    def _bad_substitution(self, start: int) -> Parameter:
        """Read an expansion that bash refuses only when it executes it."""
        depth = 1
        while depth and self.at < len(self.text):
            depth += {"{": 1, "}": -1}.get(self.text[self.at], 0)
            self.at += 1
        if depth:
            raise self.error("${ is opened here and never closed.", start)
        return Parameter("", self.text[start : self.at], operator="bad")

    def _subscript(self) -> Word:
        start = self.at
        self.at += 1
        self.nest()
        depth = 0

        def is_end(char: str) -> bool:
            nonlocal depth
            if char == "]" and depth == 0:
                return True
            depth += (char == "[") - (char == "]")
            return False

        parts = self._parts(is_end, in_quotes=False)
        self.nesting -= 1
        word = Word(
            parts=parts, source=self.text[start + 1 : self.at], span=Span(start + 1, self.at)
        )
        if self.peek() != "]":
            raise self.error("a subscript is opened here and never closed.", start)
        self.at += 1
        return word

    def _operands(self, operator: str, *, in_quotes: bool) -> tuple[Word, ...]:
        if not operator or operator.startswith("@") or operator == "names":
            return ()
        # Inside double quotes a single quote is a character, except in patterns.
        as_quoted = in_quotes and operator in (":-", ":=", ":?", ":+", "-", "=", "?", "+")
        first = self._operand(
            "}/" if operator.startswith("/") else "}:" if operator == ":" else "}",
            in_quotes=as_quoted,
        )
        if self.peek() in ("/", ":") and self.peek():
            self.at += 1
            return first, self._operand("}", in_quotes=as_quoted)
        return (first,)

    def _operand(self, ends: str, *, in_quotes: bool) -> Word:
        start = self.at
        parts = self._parts(ends.__contains__, in_quotes=in_quotes)
        return Word(parts=parts, source=self.text[start : self.at], span=Span(start, self.at))


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Join adjacent literals of the same kind."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if (
            isinstance(part, Literal)
            and isinstance(last, Literal)
            and part.is_quoted == last.is_quoted
        ):
            out[-1] = Literal(last.text + part.text, part.is_quoted)
        else:
            out.append(part)
    return tuple(out)
