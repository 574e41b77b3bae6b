"""Options and tables that several sub-commands share."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

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
    """Print a table without cutting cells: a terminal folds them, a file gets them unfolded."""
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


if TYPE_CHECKING:
    from temper_legacy_shim.configs import Cluster


class NumericsChoice(StrEnum):
    TEMPER = "temper"
    LEGACY = "legacy"


FromVersion = Annotated[
    str | None,
    typer.Option(help="The old release, such as v0.7.0; inferred from the keys by default."),
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs of each.")]
Numerics = Annotated[
    NumericsChoice,
    typer.Option(
        help=(
            "temper: engines, hazards listed. legacy: pin the deprecated workers where they "
            "were in use."
        )
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
HasTable = Annotated[bool, typer.Option("--table", help="Print every token and what became of it.")]


def read_cluster(nodes: int | None, gpus_per_node: int | None) -> "Cluster | None":
    """Return the machines the user gave; None if the old files say them.

    Raises:
        typer.BadParameter: Only one of the two options is given.
    """
    from temper_legacy_shim.configs import Cluster

    if nodes is None and gpus_per_node is None:
        return None
    if nodes is None or gpus_per_node is None:
        raise typer.BadParameter("--nodes and --gpus-per-node belong together: give both.")
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node)
