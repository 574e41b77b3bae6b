"""The lines of Megatron that the engine runs on: which versions of its two packages belong together, and what is different in each.

In: what is installed. Out: its line, or one sentence with the way to a line that fits this Python.
"""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from temper_engine_api.errors import ConfigError

CORE, BRIDGE = "megatron-core", "megatron-bridge"
UNKNOWN = "without a version"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPair:
    """Versions of megatron-core and the versions of Megatron-Bridge that belong to them."""

    core: SpecifierSet
    """Of megatron-core, those that are taken."""
    bridge: SpecifierSet
    """Of Megatron-Bridge."""
    tested: Mapping[str, str] = field(hash=False)
    """The version of each that is tested, by distribution."""
    python: SpecifierSet
    """Where pip installs both."""
    unconditional_imports: Mapping[str, str] = field(hash=False)
    """What some of its modules import though the engine never calls it, by the beginning of those modules' names."""
    ignores_rope_parameters: bool
    """Whether it looks for a model's rotary base only where transformers 4 had it, and takes 10000 where there is none."""
    lacks_router_gemm: bool
    """Whether its router, without TransformerEngine, asks for a name that it then does not define."""
    wraps_expert_submodules: bool
    """Whether a layer's specification holds its experts as a function of their submodules, or has the submodules itself."""

    def __str__(self) -> str:
        return (
            f"{CORE} {self.tested[CORE]} with {BRIDGE} {self.tested[BRIDGE]} (Python {self.python})"
        )


VERSION_PAIRS = (
    VersionPair(
        core=SpecifierSet(">=0.16.1,<0.17"),
        bridge=SpecifierSet(">=0.3.1,<0.4"),
        tested={CORE: "0.16.1", BRIDGE: "0.3.1"},
        python=SpecifierSet(">=3.11"),
        unconditional_imports={
            "transformer_engine": "megatron.bridge.peft.",
            "triton": "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        },
        ignores_rope_parameters=True,
        lacks_router_gemm=True,
        wraps_expert_submodules=False,
    ),
    VersionPair(
        core=SpecifierSet(">=0.19.2,<0.20"),
        bridge=SpecifierSet(">=0.6.2,<0.7"),
        tested={CORE: "0.19.2", BRIDGE: "0.6.2"},
        python=SpecifierSet("==3.12.*"),
        # Triton is imported by megatron-core itself and not only beside what is used, so it is required.
        unconditional_imports={"transformer_engine": "megatron.bridge.peft."},
        ignores_rope_parameters=False,
        lacks_router_gemm=False,
        wraps_expert_submodules=True,
    ),
)
"""From the oldest to the newest."""


def find_installed_pair() -> VersionPair:
    """The line that is installed.

    Raises:
        ConfigError: Megatron-Bridge is missing, or the two do not belong together, or to none of the lines.
    """
    core, bridge = _version(CORE), _version(BRIDGE)
    fitting = _fitting(core=core, bridge=bridge)
    command = _command(fitting, core=core, bridge=bridge)
    if importlib.util.find_spec("megatron.bridge") is None:
        raise ConfigError(
            f"the Megatron engine needs Megatron-Bridge, which is not installed: {command}"
        )
    if _takes(fitting.core, core) and _takes(fitting.bridge, bridge):
        return fitting
    raise ConfigError(
        f"{CORE} is {core or UNKNOWN} and {BRIDGE} {bridge or UNKNOWN}, but the Megatron engine uses names of them that change between "
        f"versions, and runs on {' or '.join(map(str, VERSION_PAIRS))}: {command}"
    )


def get_expert_submodules(layer: Any) -> Any:
    """Of a layer's specification, the parts of its mixture of experts, to be replaced in place."""
    experts = layer.submodules.mlp
    return (
        experts.keywords["submodules"]
        if find_installed_pair().wraps_expert_submodules
        else experts.submodules
    )


def _fitting(*, core: str | None, bridge: str | None) -> VersionPair:
    """The line that asks for the fewest changes: that of the core, or else of the bridge, or else the newest for this Python."""
    usable = [
        line
        for line in VERSION_PAIRS
        if line.python.contains(platform.python_version(), prereleases=True)
    ]
    of_core = [line for line in usable if _takes(line.core, core)]
    of_bridge = [line for line in usable if _takes(line.bridge, bridge)]
    return (of_core or of_bridge or usable[-1:])[0]


def _command(line: VersionPair, *, core: str | None, bridge: str | None) -> str:
    """What installs it: without requirements, because pip can't resolve the bridge's (one of them needs torch to be built)."""
    found = ((CORE, line.core, core), (BRIDGE, line.bridge, bridge))
    wrong = [
        f"{name}=={line.tested[name]}"
        for name, taken, version in found
        if not _takes(taken, version)
    ]
    return f"pip install --no-deps {' '.join(wrong)}"


def _takes(taken: SpecifierSet, version: str | None) -> bool:
    return version is not None and taken.contains(version, prereleases=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
