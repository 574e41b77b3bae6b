"""Comments of an old script that stand by its overrides, for the new script to keep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Comments:
    """What a person wrote by one token."""

    above: tuple[str, ...]
    """Whole lines, without indentation."""
    beside: str
    """After it on its line; empty where there is none."""


def comments_at(text: str, start: int, length: int) -> Comments:
    """The comment lines right above the token at `start`, and the comment after it on its line."""
    line_start = text.rfind("\n", 0, start) + 1
    above: list[str] = []
    if not text[line_start:start].strip():
        end = line_start - 1
        while end > 0:
            begin = text.rfind("\n", 0, end) + 1
            line = text[begin:end].strip()
            if not line.startswith("#") or line.startswith("#!"):
                break
            above.insert(0, line)
            end = begin - 1
    line_end = text.find("\n", start)
    rest = text[start + length : len(text) if line_end < 0 else line_end].strip()
    return Comments(tuple(above), rest if rest.startswith("#") else "")
