"""Tables on the command line.

Tables fit the terminal. Output to a file or pipe is never cut.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDEST = 1 << 16


def print_table(
    console: "Console",
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    has_lines: bool = False,
) -> None:
    """Print a table; no cell is cut.

    A terminal gets long cells folded to its width. A file or a pipe gets them unfolded: a search
    finds a whole key or sentence.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_lines=has_lines)
    for name in titles:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    _print(console, table)


def print_facts(console: "Console", rows: Iterable[tuple[str, str]]) -> None:
    """Print named facts, one below the other; no word is cut."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value.replace("[", "\\["))
    _print(console, table)


def _print(console: "Console", table: "Table") -> None:
    width = console.width
    if not console.is_terminal:
        console.width = max(
            width, console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        )
    console.print(table, soft_wrap=False)
    console.width = width
