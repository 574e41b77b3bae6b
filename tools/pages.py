"""The pages of this repository, and their fenced blocks. Standard library alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "packages/*/README.md")

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    """What its opening mark says."""
    line: int
    """Of its opening mark."""
    lines: tuple[str, ...]
    """Between the marks."""

    @property
    def text(self) -> str:
        """Its lines as one."""
        return "\n".join(self.lines)


def split_page(text: str) -> tuple[list[Block], str]:
    """A page as (its blocks, its prose, with every line where it stood and empty lines for the blocks)."""
    blocks, prose, inside = list[Block](), list[str](), list[str]()
    fence, language, start = "", "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence, language, start, inside = mark.group(1), mark.group(2), number, []
        elif mark and mark.group(1).startswith(fence) and not mark.group(2):
            blocks.append(Block(language=language, line=start, lines=tuple(inside)))
            fence = ""
        elif fence:
            inside.append(line)
        else:
            prose += [""] * (number - 1 - len(prose)) + [line]
    if fence:
        blocks.append(Block(language=language, line=start, lines=tuple(inside)))
    return blocks, "\n".join(prose)


def program(blocks: Sequence[Block], language: str) -> str:
    """The blocks of one language, each line where it stood in the page."""
    found: list[str] = []
    for block in blocks:
        if block.language == language:
            found += [""] * (block.line - len(found)) + list(block.lines)
    return "\n".join(found)
