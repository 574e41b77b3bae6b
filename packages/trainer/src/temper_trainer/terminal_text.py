"""Escape control characters of texts that a model, a tool or a file may have written.

Printed as they are, they could clear the screen, change the window's title, or hide lines.
"""

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # Marks that change the direction of the text that follows.
    "\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters other than line break and tab."""


def escape_control_characters(text: str) -> str:
    r"""Return the text with control characters as Python writes them; keeps line breaks and tabs.

    Example:
        >>> print(escape_control_characters("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii").replace(r"\r", r"\x0d")
