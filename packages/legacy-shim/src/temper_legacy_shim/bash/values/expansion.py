"""Expand words to arguments: braces, parameters, substitutions, splitting, quotes."""

import re

from temper_legacy_shim.bash.syntax.syntax_tree import (
    Arithmetic,
    DoubleQuoted,
    Literal,
    Parameter,
    Part,
    Substitution,
    Word,
    with_tilde,
)
from temper_legacy_shim.bash.values import parameters
from temper_legacy_shim.bash.values.arithmetic import BadExpression, UnknownNumber, calculate
from temper_legacy_shim.bash.values.shell_state import Shell
from temper_legacy_shim.bash.values.shell_values import (
    Field,
    Fragment,
    Piece,
    Text,
    limited,
    literal,
    sourced,
    unknown,
)
from temper_legacy_shim.errors import ScriptError

MAX_FIELDS = 20_000


_BREAK = Fragment((), is_quoted=True, is_break=True)


def expand_words(shell: Shell, words: tuple[Word, ...] | list[Word]) -> list[Field]:
    """Return the arguments of words, as a command gets them."""
    fields: list[Field] = []
    for word in words:
        before = len(fields)
        for single in expand(word):
            fields.extend(_fields(shell, single, is_complete=single is word))
        shell.reading.count_words(len(fields) - before)
        if len(fields) > MAX_FIELDS:
            raise ScriptError(
                f"a command has more than {MAX_FIELDS} arguments: the script builds more than a "
                "launch command."
            )
    return fields


def expand_text(shell: Shell, word: Word | None, *, source: str | None = None) -> Text:
    """Expand a word that bash does not split: an assignment, redirection or subject of ``case``."""
    if word is None:
        return Text()
    pieces: list[Piece] = []
    for fragment in fragments(shell, with_tilde(word), in_quotes=False):
        if fragment.is_break:
            pieces.append(Piece(" "))
        pieces.extend(fragment.pieces)
    text = limited(tuple(piece for piece in pieces if piece.value or piece.source))
    return text if source is None else sourced(text, source)


def expand_pattern(shell: Shell, word: Word) -> tuple[list[tuple[str, bool]], bool, bool]:
    """Return a word as a pattern.

    Returns:
        Pieces of text, each with True if it was quoted; True if all pieces are known; True if all
        unknown ones are only unset variables.
    """
    out, is_known, is_unset = [], True, True
    for fragment in fragments(shell, word, in_quotes=False):
        for piece in fragment.pieces:
            is_known = is_known and piece.is_known
            is_unset = is_unset and (piece.is_known or piece.is_unset)
            out.append(("" if piece.is_unset else piece.value, fragment.is_quoted))
    return out, is_known, is_unset


def fragments(shell: Shell, word: Word, *, in_quotes: bool) -> list[Fragment]:
    """Return a word's parts, expanded and not yet split."""
    out: list[Fragment] = []
    for part in word.parts:
        out.extend(_part(shell, part, in_quotes=in_quotes))
    return out


def _part(shell: Shell, part: Part, *, in_quotes: bool) -> list[Fragment]:
    if isinstance(part, Literal):
        return [Fragment((Piece(part.text),), is_quoted=part.is_quoted or in_quotes)]
    if isinstance(part, DoubleQuoted):
        inside = [
            fragment for inner in part.parts for fragment in _part(shell, inner, in_quotes=True)
        ]
        # "$@" without arguments is no argument, and "" is an empty one.
        is_empty_list = not inside and any(isinstance(inner, Parameter) for inner in part.parts)
        return inside if inside or is_empty_list else [Fragment((Piece(""),), is_quoted=True)]
    shell.reading.step()
    if isinstance(part, Arithmetic):
        value = sourced(arithmetic(shell, part.expression, part.source), part.source)
    elif isinstance(part, Substitution):
        value = substitute(shell, part)
    else:
        return _parameter(shell, part, in_quotes=in_quotes)
    return [
        Fragment(
            value.pieces or (Piece(""),),
            is_quoted=in_quotes,
            splits=not in_quotes,
        )
    ]


def _parameter(shell: Shell, part: Parameter, *, in_quotes: bool) -> list[Fragment]:
    """Expand a parameter; the elements of an array are fields of their own, except in ``"$*"``."""
    listed = parameters.elements(shell, part)
    if listed is not None:
        is_star = part.name == "*" or (part.index is not None and part.index.literal() == "*")
        if is_star and in_quotes:
            joined = _star(shell, listed)
            return [Fragment(joined.pieces or (Piece(""),), is_quoted=True)]
        out: list[Fragment] = []
        for number, field in enumerate(listed):
            if number:
                out.append(_BREAK)
            out.append(
                Fragment(
                    field.text.pieces or (Piece(""),),
                    is_quoted=in_quotes,
                    splits=not in_quotes,
                    origin=field,
                )
            )
        return out
    value = parameters.value(shell, part, in_quotes=in_quotes)
    if isinstance(value, list):
        return value
    if value.pieces == ():
        return [Fragment((Piece("", part.source),), is_quoted=in_quotes, splits=not in_quotes)]
    return [
        Fragment(
            sourced(value, part.source).pieces,
            is_quoted=in_quotes,
            splits=not in_quotes,
        )
    ]


def _star(shell: Shell, listed: list[Field]) -> Text:
    separators = shell.separators()
    text = Text()
    for number, field in enumerate(listed):
        text = text + literal(separators[:1]) + field.text if number else field.text
    return text


def _fields(shell: Shell, word: Word, *, is_complete: bool) -> list[Field]:
    builder = _Splitter(shell.separators())
    parts = fragments(shell, with_tilde(word), in_quotes=False)
    for fragment in parts:
        builder.add(fragment)
    builder.end()
    if (
        is_complete
        and len(builder.done) == 1
        and not builder.has_split
        and builder.origins[0] is None
    ):
        return [Field(builder.done[0], joined_lines(word.source), word.span.start)]
    return [
        origin or Field(text, text.raw())
        for text, origin in zip(builder.done, builder.origins, strict=True)
    ]


def joined_lines(source: str) -> str:
    """Return a word's source without continuations."""
    # Inside single quotes a backslash before a line end is literal.
    return source if "'" in source else source.replace("\\\n", "")


class _Splitter:
    """Collects arguments from fragments."""

    def __init__(self, separators: str) -> None:
        self.separators = separators
        self.done: list[Text] = []
        self.origins: list[Field | None] = []
        self.has_split = False
        self._pieces: list[Piece] = []
        self._exists = False
        self._origin: Field | None = None
        self._num_fragments = 0

    def add(self, fragment: Fragment) -> None:
        if fragment.is_break:
            self.end()
            self.has_split = True
            return
        self._num_fragments += 1
        self._origin = fragment.origin if self._num_fragments == 1 else None
        if not fragment.splits:
            self._pieces.extend(fragment.pieces)
            self._exists = (
                self._exists or fragment.is_quoted or any(piece.value for piece in fragment.pieces)
            )
            return
        for piece in self._opened(fragment.pieces):
            if piece.is_known and any(char in self.separators for char in piece.value):
                self._origin = None
            self._split(piece)

    def _opened(self, pieces: tuple[Piece, ...]) -> list[Piece]:
        """Return the pieces without whitespace, or the sources of the pieces."""
        out: list[Piece] = []
        for piece in pieces:
            has_separator = piece.is_known and any(char in self.separators for char in piece.value)
            # A variable's inner pieces keep the sources of each word, so that a split word can be
            # written as the user wrote it.
            if (has_separator or not piece.is_known) and piece.inner:
                opened = self._opened(piece.inner)
                is_split = any(
                    char in self.separators
                    for each in opened
                    if each.is_known
                    for char in each.value
                )
                out.extend(opened if has_separator or is_split else [piece])
            else:
                out.append(piece)
        return out

    def _split(self, piece: Piece) -> None:
        if not piece.is_known or not any(char in self.separators for char in piece.value):
            self._pieces.append(piece)
            self._exists = self._exists or bool(piece.value)
            return
        start = 0
        for at, char in enumerate(piece.value):
            if char not in self.separators:
                continue
            self._pieces.append(Piece(piece.value[start:at]))
            # Bash drops empty arguments between white space, but keeps those between other
            # separators: with IFS=, the text a,,b has three fields.
            self._exists = self._exists or at > start or char not in " \t\n"
            self.end()
            self.has_split = True
            start = at + 1
        self._pieces.append(Piece(piece.value[start:]))
        self._exists = self._exists or start < len(piece.value)

    def end(self) -> None:
        if self._exists:
            kept = tuple(piece for piece in self._pieces if piece.value or piece.source)
            self.done.append(limited(kept))
            self.origins.append(self._origin if self._num_fragments == 1 else None)
            if len(self.done) > MAX_FIELDS:
                raise ScriptError(
                    f"a word splits into more than {MAX_FIELDS} arguments: the script builds more "
                    "than a launch command."
                )
        self._pieces, self._exists, self._origin, self._num_fragments = [], False, None, 0


def arithmetic(shell: Shell, expression: Word, source: str) -> Text:
    """Return the value of ``$((...))``; unknown if a part is, or where bash refuses it."""
    text = expand_text(shell, expression)
    if not text.is_known:
        return unknown(source, is_unset=text.is_unset)
    try:
        return literal(
            str(
                calculate(
                    text.shown(),
                    read=lambda name: _number_text(shell, name),
                    write=lambda n, v: _write(shell, n, v),
                )
            )
        )
    except UnknownNumber:
        return unknown(source)
    except BadExpression:
        shell.reading.note(f"bash can't calculate {source.strip()[:80]!r}", expression.span.start)
        return unknown(source)


def _number_text(shell: Shell, name: str) -> str | None:
    base, _, index = name.partition("[")
    variable = shell.find(base)
    if variable is None:
        shell.free_text(base, f"${{{base}}}", has_default=False)
        raise UnknownNumber
    if index:
        text = parameters.element_text(shell, variable, index.rstrip("]"))
    else:
        text = variable.scalar()
    if text is not None and not text.is_known:
        raise UnknownNumber
    return None if text is None else text.shown()


def _write(shell: Shell, name: str, value: str) -> None:
    base, _, index = name.partition("[")
    if index:
        parameters.assign_element(shell, base, index.rstrip("]"), literal(value))
    else:
        shell.assign(base, literal(value))


def substitute(shell: Shell, part: Substitution) -> Text:
    """Return the output of ``$(...)``; unknown unless the output of every command is computed."""
    if part.is_process:
        child = shell.fork()
        shell.interpreter.run_isolated(child, part.program)
        return unknown(part.source)
    child = shell.fork()
    child.captured = Text()
    shell.interpreter.run_isolated(child, part.program)
    shell.status = child.status
    if not child.captured.is_known:
        has_only_sources = all(piece.is_known or piece.source for piece in child.captured.pieces)
        if not has_only_sources or any(piece.value == "\0" for piece in child.captured.pieces):
            return unknown(part.source)
    return sourced(_strip_last_newlines(child.captured), part.source)


def _strip_last_newlines(text: Text) -> Text:
    pieces = list(text.pieces)
    while pieces and pieces[-1].is_known:
        last = pieces[-1]
        stripped = last.value.rstrip("\n")
        if stripped == last.value:
            break
        pieces.pop()
        if stripped:
            pieces.append(Piece(stripped))
            break
    return Text(tuple(pieces))


_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?\}")
_MAX_WORDS = 2_000
_MAX_LEVELS = 12
Item = str | Part
"""One unquoted character, or a part that is taken whole."""


def expand(word: Word) -> list[Word]:
    """Expand the braces of a word; without braces, return the word."""
    if not any(
        isinstance(part, Literal) and not part.is_quoted and "{" in part.text for part in word.parts
    ):
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
            raise ScriptError(
                f"braces that stand for more than {_MAX_WORDS} words: the script builds more than "
                "a launch command."
            )
        return [[*items[:start], *first, *rest] for first in firsts for rest in rests]
    return [items]


def _alternatives(items: list[Item], start: int) -> tuple[list[list[Item]], int] | None:
    """Return the alternatives of the braces at `start`, and the end; None if they are literal."""
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
        raise ScriptError(
            f"{match[0]} stands for more than {_MAX_WORDS} words: the script builds more than a "
            "launch command."
        )
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    # As in bash, {01..10} pads all numbers to the width of the longer end.
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
