"""Translate the shell's patterns to regular expressions that match in bounded time."""

import re

_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "blank": r" \t",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9a-fA-F",
    "word": r"\w",
}
_MAX_STARS, _MAX_TEXT = 8, 4_000


class TooMuch(Exception):
    """The pattern could take long on this text."""


def compiled(pieces: list[tuple[str, bool]], *, is_greedy: bool = True) -> re.Pattern[str]:
    """Return the expression for a pattern.

    Args:
        pieces: text, and True if it is quoted, so that it matches literally.
        is_greedy: whether ``*`` takes as much as it can.

    Raises:
        TooMuch: more stars than a reader follows.
    """
    out: list[str] = []
    for text, is_quoted in pieces:
        out.append(re.escape(text) if is_quoted else _unquoted(text, is_greedy=is_greedy))
    expression = "".join(out)
    if expression.count(".*") + expression.count(")*") + expression.count(")+") > _MAX_STARS:
        raise TooMuch
    try:
        return re.compile(expression, re.DOTALL)
    except re.error:
        return re.compile(re.escape("".join(text for text, _ in pieces)))


def matches(pattern: re.Pattern[str], text: str) -> bool:
    """Match the full text.

    Raises:
        TooMuch: the text is longer than a reader looks through.
    """
    if len(text) > _MAX_TEXT:
        raise TooMuch
    return pattern.fullmatch(text) is not None


def _unquoted(text: str, *, is_greedy: bool) -> str:
    """Translate the unquoted part of a glob, with extended globs such as ``@(a|b)``."""
    out, at, closers = [], 0, []
    while at < len(text):
        char = text[at]
        if char in "@?*+!" and text[at + 1 : at + 2] == "(" and ")" in text[at:]:
            closers.append({"@": ")", "?": ")?", "*": ")*", "+": ")+", "!": ").*"}[char])
            out.append("(?!" if char == "!" else "(?:")
            at += 1
        elif closers and char == ")":
            out.append(closers.pop())
        elif closers and char == "|":
            out.append("|")
        elif char == "*":
            if not out or not out[-1].startswith(".*"):
                out.append(".*" if is_greedy else ".*?")
        elif char == "?":
            out.append(".")
        elif char == "[" and (result := _bracket(text, at)) is not None:
            expression, at = result
            out.append(expression)
            continue
        else:
            out.append(re.escape(char))
        at += 1
    return "".join(out) + "".join(reversed(closers))


def _bracket(text: str, start: int) -> tuple[str, int] | None:
    """Return the expression for ``[...]`` and where it ends; None if it is no such thing."""
    at = start + 1
    is_negated = text[at : at + 1] in ("!", "^")
    at += is_negated
    out: list[str] = []
    first = True
    while at < len(text):
        char = text[at]
        if char == "]" and not first:
            body = "".join(out)
            return f"[{'^' if is_negated else ''}{body}]", at + 1
        first = False
        if text.startswith("[:", at) and (end := text.find(":]", at)) > 0:
            out.append(_CLASSES.get(text[at + 2 : end], ""))
            at = end + 2
            continue
        out.append(char if char == "-" else re.escape(char))
        at += 1
    return None
