"""Named layouts: the parallel configurations that an engine's authors want to see held to the laws of the conformance kit.

An engine's package offers its table as a module attribute, in a module without torch, and names it in its ``pyproject.toml``:

    [project.entry-points."temper.conformance_layouts"]
    mine = "my_package.layouts:LAYOUTS"
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from temper_engine_api.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """So many ranks, and how the engine is configured on them."""

    name: str
    """Of the report's column and on the command line: small letters, digits, dots, dashes and underscores; never ``all``."""
    world_size: int
    """Ranks."""
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Fields of the engine's own configuration class, for example ``{"tensor_parallel": 2}``; all others keep the kit's values.
    ``expert_parallel`` above 1 asks for models with experts, see ``has_experts``."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == "all":
            raise ConfigError(
                f"a layout is called {self.name!r}, expected small letters, digits, dots, dashes or underscores, and not 'all'."
            )
        if self.world_size < 1:
            raise ConfigError(
                f"layout {self.name} has {self.world_size} ranks, but needs at least 1."
            )

    @property
    def has_experts(self) -> bool:
        """Whether experts are divided: such a layout is held to the laws with mixtures of experts in the place of dense models."""
        ranks = self.fields.get("expert_parallel", 1)
        return isinstance(ranks, int) and ranks > 1


def default_layout(world_size: int) -> Layout:
    """The engine's own defaults on so many ranks."""
    return Layout(name=f"{world_size}-rank{'s' if world_size > 1 else ''}", world_size=world_size)
