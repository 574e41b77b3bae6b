"""Comment variables out that nothing reads once the command is rewritten."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from temper_legacy_shim.bash.syntax.syntax_tree import (
    ArrayElement,
    Assignment,
    Block,
    Case,
    Command,
    CountingFor,
    For,
    Function,
    If,
    Loop,
    Program,
    Redirected,
    Simple,
    Span,
    Word,
)

_ONE_VARIABLE = re.compile(r"\"?\$\{?([A-Za-z_]\w*)\}?\"?")
_OVERRIDES = re.compile(r"(?:^|[\s\"'])(?:\+\+?|~)?[A-Za-z_]\w*(?:\.\w+)+=")


@dataclass(frozen=True, slots=True)
class DeadArray:
    """One assignment of an array, or of a text of overrides, that becomes a comment."""

    name: str
    span: Span
    is_single: bool
    """It may be the only command of a body, which must not become empty."""
    is_own_line: bool
    """True if only comments are on the same lines."""
    is_executed: bool
    """The reading came by; otherwise it stands in a branch that was not taken."""
    elements: tuple[ArrayElement, ...]


def find_dead_arrays(
    program: Program,
    text: str,
    *,
    rewritten: list[Span],
    tokens: set[int],
    executed: frozenset[int],
    kept: str,
) -> list[DeadArray]:
    """Find arrays that held overrides of rewritten commands and have no other use.

    Branches that were not taken count, too.

    Args:
        program: the tree of `text`.
        text: the script.
        rewritten: what no longer stands as it was: from the program that started Python to the end
            of its arguments.
        tokens: positions of the overrides of these commands.
        executed: positions of executed assignments.
        kept: the replacement at each position.
    """
    result = _with_overrides(list(_assignments(program, is_top=True)))
    used = {
        each.name
        for each in result
        if any(element.word.span.start in tokens for element in each.elements)
    }
    used |= {
        each.name
        for each in result
        if any(_is_read(each.name, text[span.start : span.end], []) for span in rewritten)
    }
    used |= {each.alias for each in result if each.name in used and each.alias}
    dead = _read_by_none_but(
        {name for name in used if not _is_read(name, kept, [])}, result, text, rewritten
    )
    return [
        DeadArray(
            each.name,
            each.span,
            not each.is_top,
            _is_own_line(text, each.span),
            each.start in executed,
            each.elements,
        )
        for each in result
        if each.name in dead
    ]


@dataclass(frozen=True, slots=True)
class _Match:
    name: str
    span: Span
    start: int
    is_top: bool
    elements: tuple[ArrayElement, ...]
    alias: str = ""


def _with_overrides(result: list[_Match]) -> list[_Match]:
    """Return names without those that only stand for variables without overrides."""
    holding = {each.name for each in result if not each.alias}
    # Repeated, because an alias may stand for another alias.
    while more := {each.name for each in result if each.alias in holding} - holding:
        holding |= more
    return [each for each in result if not each.alias or each.alias in holding]


def _read_by_none_but(
    names: set[str], result: list[_Match], text: str, rewritten: list[Span]
) -> set[str]:
    """Find names that only rewritten commands, or assignments to such names, use."""
    # Each removed name may keep another one alive, so the search continues until no name
    # drops out.
    while True:
        own = [each.span for each in result if each.name in names]
        left = {name for name in names if not _is_read(name, text, rewritten + own)}
        if left == names:
            return names
        names = left


def _is_read(name: str, text: str, but: list[Span]) -> bool:
    # By text and not by the tree: quoted text for another shell counts as a use too.
    pattern = re.compile(rf"\$\{{[#!]?{name}\b|\${name}\b")
    return any(
        not any(span.start <= match.start() < span.end for span in but)
        for match in pattern.finditer(text)
    )


def _elements(assignment: Assignment) -> tuple[ArrayElement, ...] | None:
    """Return the words of an array, or a text that holds overrides; None for other values."""
    if isinstance(assignment.value, tuple):
        return assignment.value
    if isinstance(assignment.value, Word) and (
        _OVERRIDES.search(assignment.value.source)
        or _ONE_VARIABLE.fullmatch(assignment.value.source)
    ):
        return (ArrayElement(assignment.value),)
    return None


def _alias(elements: tuple[ArrayElement, ...], assignment: Assignment) -> str:
    match = (
        _ONE_VARIABLE.fullmatch(elements[0].word.source)
        if isinstance(assignment.value, Word)
        else None
    )
    return "" if match is None else match[1]


def _is_own_line(text: str, span: Span) -> bool:
    before = text[text.rfind("\n", 0, span.start) + 1 : span.start]
    end = text.find("\n", span.end)
    after = text[span.end : len(text) if end < 0 else end].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _assignments(program: Program, *, is_top: bool) -> Iterator[_Match]:
    for item in program.items:
        for _, pipeline in item.pipelines:
            for command in pipeline.commands:
                yield from _find_command_names(command, is_top=is_top)


def _find_command_names(command: Command, *, is_top: bool) -> Iterator[_Match]:
    """Yield the assignments of arrays in a command, and in its branches and bodies."""
    if isinstance(command, Simple):
        single = (
            command.assignments[0]
            if len(command.assignments) == 1 and not command.words and not command.redirects
            else None
        )
        declared = (
            command.words[1]
            if len(command.words) == 2 and not command.assignments and not command.redirects
            else None
        )
        for assignment in (single, declared):
            if (
                isinstance(assignment, Assignment)
                and (elements := _elements(assignment)) is not None
            ):
                yield _Match(
                    assignment.name,
                    command.span,
                    assignment.span.start,
                    is_top,
                    elements,
                    _alias(elements, assignment),
                )
    elif isinstance(command, Redirected):
        yield from _find_command_names(command.command, is_top=is_top)
    elif isinstance(command, Function):
        yield from _find_command_names(command.body, is_top=False)
    elif isinstance(command, If):
        for condition, body in command.branches:
            yield from _assignments(condition, is_top=False) if condition is not None else ()
            yield from _assignments(body, is_top=False)
    elif isinstance(command, Case):
        for _, body, _ in command.branches:
            yield from _assignments(body, is_top=False)
    elif isinstance(command, Block | Loop | For | CountingFor):
        yield from _assignments(command.body, is_top=False)
