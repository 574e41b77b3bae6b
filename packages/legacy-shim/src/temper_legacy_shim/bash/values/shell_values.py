"""Values known to a static reader: known text, and unknown parts with their source text.

A ``Text`` is laid end to end from pieces. A piece that came from an expansion remembers its source,
such as ``${LR}``, so that a token can be written again as the user wrote it, whether its value is
known or not.
"""

import re
from dataclasses import dataclass, field

from temper_legacy_shim.errors import ScriptError

MAX_CHARACTERS = 200_000
_BARE = re.compile(r"[A-Za-z0-9_@%+=:,./^~-]+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a value."""

    value: str
    """Known text; the source where it is unknown."""
    source: str | None = None
    """Spelling in the script; None for literal characters."""
    is_known: bool = True
    is_unset: bool = False
    """Unknown because the script never assigns it: an unset variable in a clean environment."""
    inner: "tuple[Piece, ...]" = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Text in pieces, some of which only the run knows: a variable that the user exports, say."""

    pieces: tuple[Piece, ...] = ()

    def __add__(self, other: "Text") -> "Text":
        return limited(self.pieces + other.pieces)

    @property
    def known(self) -> str | None:
        """The value; None if a part of it is unknown."""
        return self.shown() if self.is_known else None

    @property
    def is_known(self) -> bool:
        """True if every part is known."""
        return all(piece.is_known for piece in self.pieces)

    @property
    def is_unset(self) -> bool:
        """True if all unknown parts are variables the script never assigns."""
        return not self.is_known and all(piece.is_known or piece.is_unset for piece in self.pieces)

    def shown(self) -> str:
        """Return the value, unknown parts as their sources."""
        return "".join(piece.value for piece in self.pieces)

    def if_unset(self) -> str:
        """Evaluate the value with all unassigned variables unset."""
        return "".join("" if piece.is_unset else piece.value for piece in self.pieces)

    def raw(self) -> str:
        """Return one word of shell that gives this value, sources kept."""
        if (
            all(piece.source is None and _BARE.fullmatch(piece.value) for piece in self.pieces)
            and self.pieces
        ):
            return self.shown()
        return (
            '"'
            + "".join(
                piece.source or re.sub(r'([$`"\\])', r"\\\1", piece.value) for piece in self.pieces
            )
            + '"'
        )

    def after(self, prefix: str) -> "Text | None":
        """Return the text after this known prefix; None if the value does not begin with it."""
        rest = prefix
        out: list[Piece] = []
        for index, piece in enumerate(self.pieces):
            if not rest:
                out.extend(self.pieces[index:])
                break
            if not piece.is_known:
                return None
            if piece.value.startswith(rest):
                left = piece.value[len(rest) :]
                out.extend(_cut(piece, left))
                rest = ""
            elif rest.startswith(piece.value):
                rest = rest[len(piece.value) :]
            else:
                return None
        return None if rest else Text(tuple(out))


def _cut(piece: Piece, left: str) -> tuple[Piece, ...]:
    """Return the end of a piece, from the inner parts if they are known."""
    if not left:
        return ()
    if piece.inner:
        inside = Text(piece.inner).after(piece.value[: len(piece.value) - len(left)])
        if inside is not None:
            return inside.pieces
    return (Piece(left),)


@dataclass(frozen=True, slots=True)
class Field:
    """One argument or element of an array."""

    text: Text
    source: str
    """Spelling in the script; None for literal characters."""
    at: int = -1
    """Position in the script; -1 if the text is not a single word there."""


@dataclass(slots=True)
class Variable:
    """A variable; an array where `elements` is not None."""

    text: Text | None = None
    elements: "dict[int | str, Field] | None" = None
    is_associative: bool = False
    is_exported: bool = False
    is_integer: bool = False
    case: str = field(default="")
    """``lower`` or ``upper`` by ``declare -l``, ``-u``."""

    def scalar(self) -> Text | None:
        """Return the value of ``$x``; of an array its element 0."""
        if self.elements is None:
            return self.text
        first = self.elements.get("0" if self.is_associative else 0)
        return None if first is None else first.text


def literal(text: str) -> Text:
    """Return known text without a source."""
    return limited((Piece(text),)) if text else Text()


def unknown(source: str, *, is_unset: bool = False) -> Text:
    """Return a value that only a run of the script would know."""
    return limited((Piece(source, source, is_known=False, is_unset=is_unset),))


def sourced(text: Text, source: str) -> Text:
    """Return a value the script wrote as an expansion."""
    if not text.pieces:
        return Text((Piece("", source),))
    if text.is_known:
        return limited((Piece(text.shown(), source, inner=text.pieces),))
    return Text((Piece(source, source, is_known=False, is_unset=text.is_unset, inner=text.pieces),))


def limited(pieces: tuple[Piece, ...]) -> Text:
    """Return a text of these pieces.

    Raises:
        ScriptError: it is longer than any launch script's.
    """
    # x=$x$x in a loop doubles a text each round, so a short script could fill the memory.
    if len(pieces) > 20_000 or sum(len(piece.value) for piece in pieces) > MAX_CHARACTERS:
        raise ScriptError(
            f"a value grows beyond {MAX_CHARACTERS} characters: the script builds more than a "
            "launch command."
        )
    return Text(pieces)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a word after expansion."""

    pieces: tuple[Piece, ...]
    is_quoted: bool
    splits: bool = False
    """True if its whitespace ends an argument: for expansions outside of quotes."""
    is_break: bool = False
    """An end of an argument, between elements of an array."""
    origin: Field | None = None


@dataclass(frozen=True, slots=True)
class Truth:
    value: bool | None
    """None where only a run would know."""
    is_assumed: bool = False
    """It holds if variables the script does not assign are unset."""

    def __invert__(self) -> "Truth":
        return Truth(None if self.value is None else not self.value, self.is_assumed)

    def __and__(self, other: "Truth") -> "Truth":
        if self.value is False or (other.value is False and self.value is not None):
            return self if self.value is False else other
        if None in (self.value, other.value):
            return Truth(
                False if other.value is False else None, self.is_assumed or other.is_assumed
            )
        return Truth(True, self.is_assumed or other.is_assumed)

    def __or__(self, other: "Truth") -> "Truth":
        return ~(~self & ~other)
