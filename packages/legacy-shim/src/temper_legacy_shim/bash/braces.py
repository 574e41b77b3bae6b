"""Brace expansion: ``{a,b}`` and ``{1..4}`` outside of quotes make several words of one."""

import re

from temper_legacy_shim.bash.syntax_tree import Literal, Part, Word
from temper_legacy_shim.errors import ScriptError

_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?\}")
_MAX_WORDS = 2_000
_MAX_LEVELS = 12
Atom = str | Part
"""One unquoted character, or a part that is taken whole."""


def expand(word: Word) -> list[Word]:
    """Return the words that a word stands for; itself alone if it has no braces to expand."""
    if not any(isinstance(part, Literal) and not part.is_quoted and "{" in part.text for part in word.parts):
        return [word]
    atoms: list[Atom] = []
    for part in word.parts:
        atoms.extend(part.text if isinstance(part, Literal) and not part.is_quoted else [part])
    expanded = _expand(atoms, 0)
    if len(expanded) == 1 and expanded[0] == atoms:
        return [word]
    return [Word(_parts(each), word.source, word.span) for each in expanded]


def _expand(atoms: list[Atom], level: int) -> list[list[Atom]]:
    if level > _MAX_LEVELS:
        return [atoms]
    for start, atom in enumerate(atoms):
        if atom != "{":
            continue
        found = _alternatives(atoms, start)
        if found is None:
            continue
        choices, end = found
        firsts = [each for choice in choices for each in _expand(choice, level + 1)]
        rests = _expand(atoms[end:], level + 1)
        if len(firsts) * len(rests) > _MAX_WORDS:
            raise ScriptError(f"braces that stand for more than {_MAX_WORDS} words: the script builds more than a launch command.")
        return [[*atoms[:start], *first, *rest] for first in firsts for rest in rests]
    return [atoms]


def _alternatives(atoms: list[Atom], start: int) -> tuple[list[list[Atom]], int] | None:
    """Return the alternatives of the braces that open at `start`, and the end.

    None for literal braces.
    """
    depth = 0
    choices: list[list[Atom]] = []
    current: list[Atom] = []
    for at in range(start, len(atoms)):
        atom = atoms[at]
        if atom == "{":
            depth += 1
        elif atom == "}":
            depth -= 1
            if depth == 0:
                if choices:
                    return [*choices, current], at + 1
                return _range(atoms[start : at + 1], at + 1)
        if at == start:
            continue
        if atom == "," and depth == 1:
            choices.append(current)
            current = []
        else:
            current.append(atom)
    return None


def _range(atoms: list[Atom], end: int) -> tuple[list[list[Atom]], int] | None:
    if not all(isinstance(atom, str) for atom in atoms):
        return None
    match = _RANGE.fullmatch("".join(atom for atom in atoms if isinstance(atom, str)))
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


def _parts(atoms: list[Atom]) -> tuple[Part, ...]:
    out: list[Part] = []
    for atom in atoms:
        last = out[-1] if out else None
        if not isinstance(atom, str):
            out.append(atom)
        elif isinstance(last, Literal) and not last.is_quoted:
            out[-1] = Literal(last.text + atom, is_quoted=False)
        else:
            out.append(Literal(atom, is_quoted=False))
    return tuple(out)
