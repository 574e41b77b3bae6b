"""List the repository's pages and split them into fenced blocks and prose.

Needs only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PAGES = (
    "README.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "packages/*/README.md",
)

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    """The text after the opening fence."""
    line: int
    """Line number of the opening fence."""
    lines: tuple[str, ...]
    """The lines between the fences."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def split_page(text: str) -> tuple[list[Block], str]:
    """Split a page into its blocks and its prose.

    The prose keeps its line numbers: blocks are replaced by empty lines.
    """
    blocks, prose, block_lines = list[Block](), list[str](), list[str]()
    fence, language, start = "", "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence, language, start, block_lines = mark.group(1), mark.group(2), number, []
        elif mark and mark.group(1).startswith(fence) and not mark.group(2):
            blocks.append(Block(language=language, line=start, lines=tuple(block_lines)))
            fence = ""
        elif fence:
            block_lines.append(line)
        else:
            prose += [""] * (number - 1 - len(prose)) + [line]
    if fence:
        blocks.append(Block(language=language, line=start, lines=tuple(block_lines)))
    return blocks, "\n".join(prose)


def join_blocks(blocks: Sequence[Block], language: str) -> str:
    """Return the blocks of one language as one program with the page's line numbers."""
    lines: list[str] = []
    for block in blocks:
        if block.language == language:
            lines += [""] * (block.line - len(lines)) + list(block.lines)
    return "\n".join(lines)
