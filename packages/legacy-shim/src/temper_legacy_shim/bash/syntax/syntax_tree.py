"""The tree of a shell script.

Every node has positions in the text, so that a writer can keep the rest unchanged.

A position is an offset in the text that was parsed; `end` is one past the last character.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Literal:
    """Characters that stand for themselves."""

    text: str
    is_quoted: bool
    """Quoted characters are no pattern, are not split, and are no operator of a brace expansion."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """``$x``, ``${x}``, ``${x[i]}``, ``${x:-word}``, ``${#x}``, ``${!x}``, ``${x/a/b}``."""

    name: str
    source: str
    index: "Word | None" = None
    """Subscript of an array."""
    operator: str = ""
    """Such as ``:-``, ``#``, ``^^``, or ``len`` (``${#x}``), ``keys`` (``${!x[@]}``), ``names``."""
    operands: tuple["Word", ...] = ()
    is_indirect: bool = False


@dataclass(frozen=True, slots=True)
class Substitution:
    """``$(...)`` or backquotes, or ``<(...)`` and ``>(...)``, whose value is a pipe's name."""

    program: "Program"
    source: str
    is_process: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``$((...))``; its inside is a word, expanded before it is calculated."""

    expression: "Word"
    source: str


@dataclass(frozen=True, slots=True)
class DoubleQuoted:
    """``"..."``."""

    parts: tuple["Part", ...]


Part: TypeAlias = Literal | Parameter | Substitution | Arithmetic | DoubleQuoted


@dataclass(frozen=True, slots=True)
class Word:
    """One word as written."""

    parts: tuple[Part, ...]
    source: str
    span: Span

    def literal(self) -> str | None:
        """Return the text if nothing is quoted or expanded, as in reserved words."""
        if all(isinstance(part, Literal) and not part.is_quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True)
class Assignment:
    """``x=word``, ``x+=word``, ``x[i]=word``, ``x=(word word)``."""

    name: str
    value: "Word | tuple[ArrayElement, ...] | None"
    """None for an empty value; a tuple for an array."""
    is_appending: bool
    index: Word | None
    span: Span


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """One word between an array's parentheses; with a key for ``[key]=word``."""

    word: Word
    key: Word | None = None


@dataclass(frozen=True, slots=True)
class Redirect:
    """``>file``, ``2>&1``, ``<<EOF``."""

    operator: str
    target: Word | None
    """Target word; the body of a heredoc, expanded unless its delimiter is quoted."""
    span: Span


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its arguments, or assignments alone."""

    assignments: tuple[Assignment, ...]
    words: "tuple[Word | Assignment, ...]"
    """Assignments among them are arguments of declare, export, local and readonly."""
    redirects: tuple[Redirect, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Test:
    """A test ``[[ ... ]]``: operators and words."""

    tokens: "tuple[str | Word, ...]"
    """Operators as text, operands as words."""
    span: Span


@dataclass(frozen=True, slots=True)
class Calculation:
    """``((...))``."""

    expression: Word
    span: Span


@dataclass(frozen=True, slots=True)
class Block:
    """``{ ...; }`` or ``( ... )``."""

    body: "Program"
    is_subshell: bool
    span: Span


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies; the last condition is None for ``else``."""

    branches: "tuple[tuple[Program | None, Program], ...]"
    span: Span


@dataclass(frozen=True, slots=True)
class Loop:
    """``while`` and ``until``."""

    condition: "Program"
    body: "Program"
    is_until: bool
    span: Span


@dataclass(frozen=True, slots=True)
class For:
    """A loop ``for x in words``; words is None for the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: "Program"
    span: Span


@dataclass(frozen=True, slots=True)
class CountingFor:
    """A loop ``for ((a; b; c))``."""

    start: Word
    condition: Word
    step: Word
    body: "Program"
    span: Span


@dataclass(frozen=True, slots=True)
class Case:
    """``case word in pattern) ...;; esac``."""

    case_word: Word
    branches: "tuple[tuple[tuple[Word, ...], Program, str], ...]"
    """Patterns, body, and the operator that ends it."""
    span: Span


@dataclass(frozen=True, slots=True)
class Function:
    """A definition."""

    name: str
    body: "Command"
    span: Span


@dataclass(frozen=True, slots=True)
class Redirected:
    """A compound command with redirections."""

    command: "Command"
    redirects: tuple[Redirect, ...]
    span: Span


Command: TypeAlias = (
    Simple
    | Test
    | Calculation
    | Block
    | If
    | Loop
    | For
    | CountingFor
    | Case
    | Function
    | Redirected
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``."""

    commands: tuple[Command, ...]
    is_negated: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Item:
    """Pipelines joined by ``&&`` and ``||``; the first operator is empty."""

    pipelines: tuple[tuple[str, Pipeline], ...]
    is_background: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Program:
    """A list of commands."""

    items: tuple[Item, ...]
    span: Span = field(default=Span(0, 0))


def children(node: object) -> list[object]:
    """Return the parts of a node or of a tuple of nodes."""
    if isinstance(node, tuple):
        return list(node)
    return [getattr(node, each.name) for each in fields(node)] if is_dataclass(node) else []


def walk(node: object) -> Iterator[object]:
    """Yield a node and all below it in order, in a stack of its own that fits any nesting."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += reversed(children(node))


def with_tilde(word: Word) -> Word:
    """Replace ``~`` and ``~/...`` at the beginning by ``${HOME}``."""
    first = word.parts[0] if word.parts else None
    if (
        isinstance(first, Literal)
        and not first.is_quoted
        and (first.text == "~" or first.text.startswith("~/"))
    ):
        home = Parameter("HOME", "${HOME}")
        rest = (Literal(first.text[1:], is_quoted=False),) if len(first.text) > 1 else ()
        return Word((home, *rest, *word.parts[1:]), word.source, word.span)
    return word
