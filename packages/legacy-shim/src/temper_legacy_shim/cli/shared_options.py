"""Options that several sub-commands have, and the check of two of them."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from temper_legacy_shim.configs import Cluster


class NumericsChoice(StrEnum):
    """Numerics of the result."""

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
    """Return the machines that the user gave; None if the old files say them.

    Raises:
        typer.BadParameter: Only one of the two options is given.
    """
    from temper_legacy_shim.configs import Cluster

    if nodes is None and gpus_per_node is None:
        return None
    if nodes is None or gpus_per_node is None:
        raise typer.BadParameter("--nodes and --gpus-per-node belong together: give both.")
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node)
