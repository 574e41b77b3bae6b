"""Where every value came from: the last layer that said something about it."""

from collections.abc import Mapping, Sequence

from temper_trainer.config_loading.composition import COMMAND_LINE, FILE, Layer

DEFAULT = "default"
"""Origin of a value that nobody set."""


def origins_of(leaves: Mapping[str, object], *, layers: Sequence[Layer]) -> dict[str, str]:
    """Origin of each dotted key.

    A layer that gives a block as a whole (an interpolation, an empty mapping, null) is the origin of what stands below it.

    Args:
        leaves: the resolved values.
        layers: what was said, later ones winning.
    """
    origins = {}
    for key in leaves:
        origin = DEFAULT
        for layer in layers:
            if any(_concerns(said, key) for said in layer.leaves):
                origin = DEFAULT if layer.is_deletion else layer.origin
        origins[key] = origin
    return origins


def is_users(origin: str) -> bool:
    """Whether the user wrote it, on the command line or in a file of theirs."""
    return origin == COMMAND_LINE or origin.startswith(FILE)


def _concerns(said: str, key: str) -> bool:
    return said == key or key.startswith(f"{said}.") or said.startswith(f"{key}.")
