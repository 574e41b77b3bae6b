"""Brace expansion: ``{a,b}`` and ``{1..4}`` outside of quotes make several words of one."""

import re

from temper_legacy_shim.bash.syntax_tree import Literal, Part, Word
from temper_legacy_shim.errors import ScriptError

_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?\}")
_MAX_WORDS = 2_000
_MAX_LEVELS = 12
Item = str | Part
"""One unquoted character, or a part that is taken whole."""


def expand(word: Word) -> list[Word]:
    """Return the words that a word stands for; itself alone if it has no braces to expand."""
    if not any(isinstance(part, Literal) and not part.is_quoted and "{" in part.text for part in word.parts):
        return [word]
    items: list[Item] = []
    for part in word.parts:
        items.extend(part.text if isinstance(part, Literal) and not part.is_quoted else [part])
    expanded = _expand(items, 0)
    if len(expanded) == 1 and expanded[0] == items:
        return [word]
    return [Word(_parts(each), word.source, word.span) for each in expanded]


def _expand(items: list[Item], level: int) -> list[list[Item]]:
    if level > _MAX_LEVELS:
        return [items]
    for start, item in enumerate(items):
        if item != "{":
            continue
        result = _alternatives(items, start)
        if result is None:
            continue
        choices, end = result
        firsts = [each for choice in choices for each in _expand(choice, level + 1)]
        rests = _expand(items[end:], level + 1)
        if len(firsts) * len(rests) > _MAX_WORDS:
            raise ScriptError(f"braces that stand for more than {_MAX_WORDS} words: the script builds more than a launch command.")
        return [[*items[:start], *first, *rest] for first in firsts for rest in rests]
    return [items]


def _alternatives(items: list[Item], start: int) -> tuple[list[list[Item]], int] | None:
    """Return the alternatives of the braces that open at `start`, and the end.

    None for literal braces.
    """
    depth = 0
    choices: list[list[Item]] = []
    current: list[Item] = []
    for at in range(start, len(items)):
        item = items[at]
        if item == "{":
            depth += 1
        elif item == "}":
            depth -= 1
            if depth == 0:
                if choices:
                    return [*choices, current], at + 1
                return _range(items[start : at + 1], at + 1)
        if at == start:
            continue
        if item == "," and depth == 1:
            choices.append(current)
            current = []
        else:
            current.append(item)
    return None


def _range(items: list[Item], end: int) -> tuple[list[list[Item]], int] | None:
    if not all(isinstance(item, str) for item in items):
        return None
    match = _RANGE.fullmatch("".join(item for item in items if isinstance(item, str)))
    if match is None or match[1].lstrip("-").isdigit() != match[2].lstrip("-").isdigit():
        return None
    is_number = match[1].lstrip("-").isdigit()
    first, last = (int(match[1]), int(match[2])) if is_number else (ord(match[1]), ord(match[2]))
    step = abs(int(match[3] or 1)) or 1
    if abs(last - first) // step > _MAX_WORDS:
        raise ScriptError(f"{match[0]} stands for more than {_MAX_WORDS} words: the script builds more than a launch command.")
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    padded = is_number and any(re.fullmatch(r"-?0\d+", text) for text in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    return [list(f"{number:0{width}d}" if is_number else chr(number)) for number in numbers], end


def _parts(items: list[Item]) -> tuple[Part, ...]:
    out: list[Part] = []
    for item in items:
        last = out[-1] if out else None
        if not isinstance(item, str):
            out.append(item)
        elif isinstance(last, Literal) and not last.is_quoted:
            out[-1] = Literal(last.text + item, is_quoted=False)
        else:
            out.append(Literal(item, is_quoted=False))
    return tuple(out)
