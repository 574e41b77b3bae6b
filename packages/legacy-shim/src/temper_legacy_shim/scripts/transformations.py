"""``${x#pattern}``, ``${x/a/b}``, ``${x^^}``, ``${x:1:2}``: values made of values. Of an unknown value the result is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from temper_legacy_shim.scripts import expansion
from temper_legacy_shim.scripts.patterns import TooMuch, compiled
from temper_legacy_shim.scripts.tree import Parameter, Word
from temper_legacy_shim.scripts.values import Field, Text, literal, unknown

if TYPE_CHECKING:
    from temper_legacy_shim.scripts.state import Shell

_MAX_SCANNED = 2_000
"""Characters of a value that patterns are tried on, from every place to every place."""


def transformed(shell: Shell, part: Parameter, text: Text) -> Text:
    """A value after the operator of its expansion."""
    known = text.known
    operator = part.operator
    if known is None:
        return unknown(part.source)
    try:
        if operator in ("#", "##", "%", "%%"):
            return _applied(part, known, _pattern(shell, part), lambda pattern, t: _trimmed(pattern, t, operator))
        if operator.startswith("/"):
            return _replaced(shell, part, known)
        if operator in ("^", "^^", ",", ",,"):
            return literal(_cased(known, operator)) if not part.operands[0].source else unknown(part.source)
        if operator == ":":
            return _part_of(shell, part, known)
    except TooMuch:
        return unknown(part.source)
    if operator in ("@U", "@L", "@u"):
        return literal({"@U": known.upper(), "@L": known.lower(), "@u": known[:1].upper() + known[1:]}[operator])
    return unknown(part.source)


def _pattern(shell: Shell, part: Parameter) -> list[tuple[str, bool]] | None:
    pieces, is_known, _ = expansion.expand_pattern(shell, part.operands[0])
    return pieces if is_known else None


def _applied(
    part: Parameter, known: str, pieces: list[tuple[str, bool]] | None, change: Callable[[list[tuple[str, bool]], str], str]
) -> Text:
    if pieces is None or len(known) > _MAX_SCANNED:
        return unknown(part.source)
    return literal(change(pieces, known))


def _trimmed(pieces: list[tuple[str, bool]], text: str, operator: str) -> str:
    pattern = compiled(pieces)
    ends = range(len(text) + 1)
    if operator in ("#", "%%"):
        order = iter(ends)
    else:
        order = reversed(ends)
    for at in order:
        if operator.startswith("#") and pattern.fullmatch(text, 0, at):
            return text[at:]
        if operator.startswith("%") and pattern.fullmatch(text, at):
            return text[:at]
    return text


def _replaced(shell: Shell, part: Parameter, known: str) -> Text:
    pieces = _pattern(shell, part)
    replacement = expansion.expand_text(shell, part.operands[1]) if len(part.operands) > 1 else Text()
    if pieces is None or not replacement.is_known or len(known) > _MAX_SCANNED:
        return unknown(part.source)
    pattern, new = compiled(pieces), replacement.shown()
    if not pattern.pattern:
        return literal(new + known if part.operator == "/#" else known + new if part.operator == "/%" else known)
    if part.operator == "/#":
        match = pattern.match(known)
        return literal(known if match is None else new + known[match.end() :])
    if part.operator == "/%":
        start = next((at for at in range(len(known) + 1) if pattern.fullmatch(known, at)), None)
        return literal(known if start is None else known[:start] + new)
    out, at = [], 0
    for match in pattern.finditer(known):
        if match.end() == match.start():
            continue
        out += [known[at : match.start()], new]
        at = match.end()
        if part.operator == "/":
            break
    return literal("".join(out) + known[at:])


def _cased(text: str, operator: str) -> str:
    if len(operator) == 2:
        return text.upper() if operator == "^^" else text.lower()
    return (text[:1].upper() if operator == "^" else text[:1].lower()) + text[1:]


def _bounds(shell: Shell, operands: tuple[Word, ...]) -> list[int] | None:
    """Offset and length of ``${x:offset:length}``; None where one is not known."""
    out = []
    for operand in operands:
        text = expansion.arithmetic(shell, operand, operand.source).known
        if text is None:
            return None
        out.append(int(text))
    return out


def _part_of(shell: Shell, part: Parameter, known: str) -> Text:
    bounds = _bounds(shell, part.operands)
    if bounds is None:
        return unknown(part.source)
    start = bounds[0] if bounds[0] >= 0 else len(known) + bounds[0]
    if not 0 <= start <= len(known):
        return Text()
    end = len(known) if len(bounds) < 2 else start + bounds[1] if bounds[1] >= 0 else len(known) + bounds[1]
    return literal(known[start : max(end, start)])


def sliced(shell: Shell, part: Parameter, listed: list[Field], indices: list[int]) -> list[Field]:
    """``${x[@]:offset:length}``; the offset is an index, also where elements before it are missing."""
    bounds = _bounds(shell, part.operands)
    if bounds is None:
        return [Field(unknown(part.source), f'"{part.source}"')]
    if part.name in ("@", "*"):
        listed = [Field(unknown("$0"), '"$0"'), *listed]
    keys = list(range(len(listed))) if part.name in ("@", "*") else indices
    start = bounds[0] if bounds[0] >= 0 else max([*keys, -1]) + 1 + bounds[0]
    found = [field for key, field in zip(keys, listed, strict=True) if key >= start] if start >= 0 else []
    return found if len(bounds) < 2 else found[: max(bounds[1], 0)]
