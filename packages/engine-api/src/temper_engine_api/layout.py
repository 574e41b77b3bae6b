"""Named parallel layouts with which the conformance tests run an engine.

An engine's package defines them as a module attribute, in a module that does not import torch, and
names it in its `pyproject.toml`:

    [project.entry-points."temper.conformance_layouts"]
    my_engine = "my_package.layouts:LAYOUTS"
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rank count and engine settings for one parallel layout.

    Example:
        >>> Layout(name="tp2-dp2", world_size=4, fields={"tensor_parallel": 2}).has_experts
        False
    """

    name: str
    """Column in the report and name on the command line: lower-case letters, digits, dots, dashes
    and underscores; not `all`."""
    world_size: int
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Fields of the engine's configuration class that differ from the tests' defaults, for example
    `{"tensor_parallel": 2}`."""
    without: frozenset[Capability] = frozenset()
    """Capabilities that the engine claims, but refuses in this layout with a message that names a
    field.

    Their tests do not run in it."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == "all":
            raise ConfigError(
                f"layout name {self.name!r} is not valid: use lower-case letters, digits, dots, "
                "dashes and underscores, and not 'all'."
            )
        if self.world_size < 1:
            raise ConfigError(
                f"layout {self.name} has world_size {self.world_size}, but needs at least 1."
            )

    @property
    def has_experts(self) -> bool:
        """True with expert parallelism; such a layout is tested with MoE instead of dense models.

        The field is a number of ranks, or true for all ranks.
        """
        ranks = self.fields.get("expert_parallel", 1)
        return ranks is True or (isinstance(ranks, int) and ranks > 1)


def default_layout(world_size: int) -> Layout:
    """Return the layout with the engine's default settings for this many ranks."""
    return Layout(name=f"{world_size}-rank{'s' if world_size > 1 else ''}", world_size=world_size)
