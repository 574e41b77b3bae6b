"""Pairs of Megatron-Core and Megatron-Bridge versions that work together, and how they differ."""

import functools
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from temper_engine_api.errors import ConfigError

CORE, BRIDGE = "megatron-core", "megatron-bridge"
NO_VERSION = "without a version"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPair:
    """Versions of megatron-core and megatron-bridge that work together."""

    core: SpecifierSet
    """Supported versions of megatron-core."""
    bridge: SpecifierSet
    """Supported versions of megatron-bridge."""
    tested: Mapping[str, str] = field(hash=False)
    """Tested version by distribution."""
    python: SpecifierSet
    """Python versions that pip installs both for."""
    unused_package_importers: Mapping[str, str] = field(hash=False)
    """Modules that import a package which this engine never needs, by package.

    The value is a name prefix of the importing modules. `bridge_import` stubs the package
    while they are imported."""
    ignores_rope_parameters: bool
    """True if the bridge reads `rope_theta` (transformers 4), but not `rope_parameters` (5).

    It uses 10000 if it finds none."""
    router_needs_transformer_engine: bool
    """True if the router calls a GEMM function that only TransformerEngine defines."""
    wraps_mlp_submodules: bool
    """True if `layer_spec.submodules.mlp` is a `functools.partial` that holds the submodules."""

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
        unused_package_importers={
            "transformer_engine": "megatron.bridge.peft.",
            "triton": "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        },
        ignores_rope_parameters=True,
        router_needs_transformer_engine=True,
        wraps_mlp_submodules=False,
    ),
    VersionPair(
        core=SpecifierSet(">=0.19.2,<0.20"),
        bridge=SpecifierSet(">=0.6.2,<0.7"),
        tested={CORE: "0.19.2", BRIDGE: "0.6.2"},
        python=SpecifierSet("==3.12.*"),
        # megatron-core 0.19 itself imports Triton, so this package requires it.
        unused_package_importers={"transformer_engine": "megatron.bridge.peft."},
        ignores_rope_parameters=False,
        router_needs_transformer_engine=False,
        wraps_mlp_submodules=True,
    ),
)
"""Supported pairs of versions, oldest first."""


def find_installed_pair() -> VersionPair:
    """Return the installed pair of versions.

    Raises:
        ConfigError: If Megatron-Bridge is missing, or the installed versions are not a supported
            pair; the message has the pip command that fixes it.
    """
    core, bridge = _installed_version(CORE), _installed_version(BRIDGE)
    pair = _closest_pair(core=core, bridge=bridge)
    command = _install_command(pair, core=core, bridge=bridge)
    if importlib.util.find_spec("megatron.bridge") is None:
        raise ConfigError(
            f"the Megatron engine needs Megatron-Bridge, which is not installed: {command}"
        )
    if _supports(pair.core, core) and _supports(pair.bridge, bridge):
        return pair
    raise ConfigError(
        f"{CORE} is {core or NO_VERSION} and {BRIDGE} {bridge or NO_VERSION}, but the Megatron "
        "engine uses internals that change between versions, and supports only "
        f"{' or '.join(map(str, VERSION_PAIRS))}: {command}"
    )


def get_mlp_submodules(layer_spec: Any) -> Any:
    """Return the parts of a layer spec's MLP or mixture of experts, to be replaced in place."""
    mlp = layer_spec.submodules.mlp
    return (
        mlp.keywords["submodules"] if find_installed_pair().wraps_mlp_submodules else mlp.submodules
    )


def replace_experts(layer_spec: Any, experts: type) -> None:
    """Replace the module of a layer spec's sequential experts, in place."""
    submodules = get_mlp_submodules(layer_spec)
    if find_installed_pair().wraps_mlp_submodules:
        submodules.experts = functools.partial(experts, **submodules.experts.keywords)
    else:
        submodules.experts.module = experts


def _closest_pair(*, core: str | None, bridge: str | None) -> VersionPair:
    """Return the supported pair that needs the fewest packages to be installed.

    That is the pair that matches the installed core, else the installed bridge, else the newest
    pair for this Python.
    """
    usable = [
        pair
        for pair in VERSION_PAIRS
        if pair.python.contains(platform.python_version(), prereleases=True)
    ]
    with_core = [pair for pair in usable if _supports(pair.core, core)]
    with_bridge = [pair for pair in usable if _supports(pair.bridge, bridge)]
    return (with_core or with_bridge or usable[-1:])[0]


def _install_command(pair: VersionPair, *, core: str | None, bridge: str | None) -> str:
    """Return the command that installs a pair.

    Install it without dependencies. pip cannot resolve them, because one of them needs torch to
    build.
    """
    distributions = ((CORE, pair.core, core), (BRIDGE, pair.bridge, bridge))
    to_install = [
        f"{name}=={pair.tested[name]}"
        for name, supported, version in distributions
        if not _supports(supported, version)
    ]
    return f"pip install --no-deps {' '.join(to_install)}"


def _supports(supported: SpecifierSet, version: str | None) -> bool:
    return version is not None and supported.contains(version, prereleases=True)


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
