"""Grammar of simple commands: assignments, arguments, arrays, redirections and heredocs."""

import re

from temper_legacy_shim.bash.syntax.lexer import METACHARACTERS, Words
from temper_legacy_shim.bash.syntax.syntax_tree import (
    ArrayElement,
    Assignment,
    DoubleQuoted,
    Literal,
    Redirect,
    Simple,
    Span,
    Word,
)

_REDIRECT = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(&>>|&>|<<<|<<-|<<|<&|<>|<|>>|>\||>&|>)(?!\()")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DECLARING = ("declare", "typeset", "export", "local", "readonly")


class SimpleCommands(Words):
    """Simple commands of a text; ``parser.Parser`` adds compound ones."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._after_bodies: dict[int, int] = {}
        """End of a line with heredocs: the end of the last heredoc."""

    def simple(self) -> Simple:
        """Return a command with its assignments, arguments and redirections."""
        start = end = self.at
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirects: list[Redirect] = []
        is_declaring = False
        while True:
            self.skip()
            redirect = self.redirect()
            if redirect is not None:
                redirects.append(redirect)
            elif not words and (assignment := self._assignment()) is not None:
                assignments.append(assignment)
            elif is_declaring and (assignment := self._assignment()) is not None:
                words.append(assignment)
            else:
                word = self.word()
                if not word.source:
                    break
                words.append(word)
                is_declaring = is_declaring or (len(words) == 1 and word.literal() in _DECLARING)
            end = self.at
        if not (words or assignments or redirects):
            raise self.error(f"{self.here()} where a command should begin.")
        if self.peek() == "(":
            raise self.error("an unexpected '('.")
        return Simple(tuple(assignments), tuple(words), tuple(redirects), Span(start, end))

    def _assignment(self) -> Assignment | None:
        """Parse ``name=value``, ``name[index]=value`` or ``name=(...)``, also with ``+=``."""
        start = self.at
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        index = None
        if self.peek() == "[":
            close = re.compile(r"\[[^\n\]]*\]\+?=").match(self.text, self.at)
            if close is None:
                self.at = start
                return None
            index = self._subscript()
        is_appending = self.peek(2) == "+="
        self.at += is_appending
        if self.peek() != "=":
            self.at = start
            return None
        self.at += 1
        if self.peek() == "(" and index is None:
            elements = self._array()
            return Assignment(match[0], elements, is_appending, index, Span(start, self.at))
        value = self.word()
        return Assignment(
            match[0], value if value.source else None, is_appending, index, Span(start, self.at)
        )

    def _array(self) -> tuple[ArrayElement, ...]:
        start = self.at
        elements: list[ArrayElement] = []
        self.at += 1
        while True:
            self.skip(newlines=True)
            if self.peek() == ")":
                self.at += 1
                return tuple(elements)
            key = None
            if self.peek() == "[" and re.compile(r"\[[^\n\]]*\]=").match(self.text, self.at):
                key = self._subscript()
                self.at += 1
            word = self.word()
            if not word.source and key is None:
                raise self.error(
                    f"{self.here()} inside an array that is opened here."
                    if self.peek()
                    else "( is never closed.",
                    start,
                )
            elements.append(ArrayElement(word, key))

    def words(self) -> tuple[Word, ...]:
        words: list[Word] = []
        while True:
            self.skip()
            word = self.word()
            if not word.source:
                return tuple(words)
            words.append(word)

    def redirect(self) -> Redirect | None:
        """Return a redirection, if one starts here."""
        start = self.at
        match = _REDIRECT.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip()
        if match[1] in ("<<", "<<-"):
            return self._heredoc(match[1], start)
        target = self.word()
        if not target.source:
            raise self.error(f"{self.here()} where the file of a redirection should be.")
        return Redirect(match[1], target, Span(start, self.at))

    def _heredoc(self, operator: str, start: int) -> Redirect:
        """Parse a here-document; its body follows the line, after the bodies of earlier ones."""
        delimiter = self.word()
        end_of_line = self.at
        # A backslash at its end continues the line.
        while (end_of_line := self.text.find("\n", end_of_line)) >= 0 and self.text[
            end_of_line - 1
        ] == "\\":
            end_of_line += 1
        if end_of_line < 0:
            return Redirect(operator, None, Span(start, self.at))
        ends_with = "".join(part.text for part in _flat(delimiter))
        # The bodies of several here-documents of one line follow each other.
        at, lines = self._after_bodies.get(end_of_line, end_of_line + 1), []
        while at < len(self.text):
            stop = self.text.find("\n", at)
            line = self.text[at:] if stop < 0 else self.text[at:stop]
            at = len(self.text) if stop < 0 else stop + 1
            line = line.lstrip("\t") if operator == "<<-" else line
            if line == ends_with:
                break
            lines.append(line + "\n")
        self._after_bodies[end_of_line] = at
        body = "".join(lines)
        # A quoted delimiter means that nothing in the body is expanded.
        is_literal = any(part.is_quoted for part in _flat(delimiter))
        inside = type(self)(body)
        inside.nesting = self.nesting
        word = (
            Word((Literal(body, is_quoted=True),), body, Span(0, len(body)))
            if is_literal
            else inside.heredoc_body()
        )
        return Redirect(operator, word, Span(start, self.at))

    def skip(self, *, newlines: bool = False) -> None:
        """Skip blanks, continuations and comments; with `newlines` line ends and heredocs, too."""
        while char := self.peek():
            if char in " \t\r" and not (char == "\r" and self.peek(2) != "\r\n"):
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n" and newlines:
                self.at = self._after_bodies.pop(self.at, self.at + 1)
            else:
                return

    def skip_separator(self) -> None:
        """Skip a semicolon and line ends."""
        self.skip()
        if self.peek() == ";":
            self.at += 1
        self.skip(newlines=True)

    def reserved(self) -> str:
        """Return the unquoted word that starts here, or nothing."""
        end = self.at
        while (
            end < len(self.text)
            and self.text[end] not in METACHARACTERS
            and self.text[end] not in "$`\"'\\\r"
        ):
            end += 1
        if end < len(self.text) and self.text[end] in "$`\"'\\":
            return "" if self.text[end : end + 2] != "\\\n" else self.text[self.at : end]
        return self.text[self.at : end]

    def expect(self, word: str) -> None:
        """Skip a reserved word that is required here."""
        self.skip(newlines=True)
        if self.reserved() != word:
            raise self.error(f"{self.here()} where {word!r} should be.")
        self.at += len(word)

    def here(self) -> str:
        """Return the text at this position, for a message."""
        if not self.peek():
            return "the script ends"
        return (
            f"{self.text[self.at : self.at + 12].splitlines()[0]!r}"
            if self.peek() != "\n"
            else "a line ends"
        )


def _flat(word: Word) -> list[Literal]:
    """Return the literal pieces of a heredoc's delimiter, in which nothing is expanded."""
    out = []
    for part in word.parts:
        if isinstance(part, Literal):
            out.append(part)
        elif isinstance(part, DoubleQuoted):
            out.extend(inner for inner in part.parts if isinstance(inner, Literal))
            out.append(Literal("", is_quoted=True))
    return out
