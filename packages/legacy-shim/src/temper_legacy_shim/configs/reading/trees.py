"""Default trees of all old releases, read from ``data/trees.json``."""

import json
import re
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.errors import UsageError

Family = Literal[
    "ppo_fsdp",
    "ppo_megatron",
    "sft_columns",
    "sft_fsdp",
    "sft_megatron",
    "generation",
    "evaluation",
]
"""Default trees; ``sft_columns`` is SFT's first generation, before engines."""

GONE = {"$gone": True}
"""Value in a history for a removed key."""
BASE = {"$base": True}
"""Value in the history of a further configuration for the default of the tree below it."""
MAIN = "main"
"""The newest stored commit of verl that is no release."""


@cache
def _packed() -> dict[str, Plain]:
    text = (
        resources.files("temper_legacy_shim.configs")
        .joinpath("data/trees.json")
        .read_text(encoding="utf-8")
    )
    packed: dict[str, Plain] = json.loads(text)
    return packed


@cache
def versions() -> tuple[str, ...]:
    """List all releases with a tree, oldest first."""
    result = _packed()["versions"]
    assert isinstance(result, list)
    return tuple(str(version) for version in result)


def known_version(text: str) -> str:
    """Return the release whose trees apply to a version.

    A version is, for example, ``0.7``, ``v0.7.1``, ``v0.4.0.post3`` or ``main``.

    A version between two known releases has the trees of the earlier one.

    Raises:
        UsageError: The text is no version, or a version before v0.2 or after the newest known
            release.
    """
    if text.strip() == MAIN:
        return MAIN
    match = _VERSION.match(text.strip())
    known = [version for version in versions() if version != MAIN]
    if match is None:
        raise UsageError(
            f"{text!r} is no version: give one such as v0.7.1, from {known[0]} to {known[-1]}, or "
            f"{MAIN}."
        )
    expected = _number(match)
    if expected < _parsed(known[0]):
        raise UsageError(
            f"{text} is older than the oldest known release: give one from {known[0]} to "
            f"{known[-1]}, or {MAIN}."
        )
    newest = _parsed(known[-1])
    is_line = match[3] is None and match[4] is None  # v0.4 means the last of its line
    if (expected[:2] > newest[:2]) if is_line else (expected > newest):
        raise UsageError(
            f"{text} is newer than the newest release that is known here, {known[-1]}: keys and "
            "defaults may have changed. Update temper-legacy-shim, or give --from-version "
            f"{known[-1]} to translate it as that release."
        )
    last = (*expected[:2], 99, 99) if is_line else expected
    return [version for version in known if _parsed(version) <= last][-1]


_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(post|rc|dev)(\d+))?")


def _parsed(version: str) -> tuple[int, int, int, int]:
    match = _VERSION.match(version)
    assert match is not None
    return _number(match)


def described(version: str) -> str:
    """Return the name of a release; main with commit and date."""
    commits = _packed()["commits"]
    assert isinstance(commits, dict)
    commit = commits.get(version)
    return (
        f"{version} (commit {commit['commit']} of {commit['date']})"
        if isinstance(commit, dict)
        else version
    )


def _number(match: re.Match[str]) -> tuple[int, int, int, int]:
    patch = int(match[3] or 0)
    post = {None: 0, "post": 1 + int(match[5] or 0), "rc": 0, "dev": 0}[match[4]]
    return int(match[1]), int(match[2]), patch, post


def order(version: str) -> int:
    """Return the position of a known release: what "since v0.4.0" compares."""
    return versions().index(version)


def families_of(version: str) -> tuple[Family, ...]:
    """Return the trees that a release had."""
    families = _packed()["families"]
    assert isinstance(families, dict)
    number = order(version)
    return tuple(name for name, block in families.items() if number in block["present"])  # type: ignore[misc,index,operator,call-overload]


@cache
def history_of(family: Family, key: str) -> tuple[tuple[str, Plain], ...]:
    """Return the releases that changed a key's default, with it, or GONE if removed."""
    history = _keys(family).get(key, [])
    return tuple((versions()[number], value) for number, value in history)


def default_tree(version: str, family: Family) -> dict[str, Plain]:
    """Return the leaves by dotted key, with interpolations unresolved.

    Raises:
        UsageError: the release lacks this tree.
    """
    if family not in families_of(version):
        had = ", ".join(families_of(version))
        raise UsageError(
            f"{version} had no configuration of the kind {family}: it had {had}. Give another "
            "version."
        )
    return dict(_tree(version, family))


@cache
def _tree(version: str, family: Family) -> dict[str, Plain]:
    number = order(version)
    tree: dict[str, Plain] = {}
    for key, history in _keys(family).items():
        value: Plain = GONE  # type: ignore[assignment]
        for since, default in history:
            # Histories are in the order of releases.
            if since > number:
                break
            value = default
        if value != GONE:
            tree[key] = value
    return tree


@cache
def releases_of_program(path: str) -> tuple[str, ...]:
    """Return the releases with a program of verl's package, oldest first; empty if none had it."""
    programs: dict[str, list[int]] = _packed()["programs"]  # type: ignore[assignment]
    name = next((name for name in programs if f".{path}".endswith(f".{name}")), None)
    return tuple(versions()[number] for number in programs[name]) if name else ()


@cache
def own_configs() -> frozenset[str]:
    """Return the names of configurations of asynchronous trainers, recipes and examples."""
    return frozenset(_configs())


def releases_of(config: str) -> tuple[str, ...]:
    """Return the releases that shipped a further configuration, oldest first."""
    return tuple(versions()[number] for number in _configs()[config]["present"])


@cache
def _config_changes(version: str, config: str) -> dict[str, Plain]:
    """Return a configuration's changes to the tree below it; GONE for a removed key."""
    number = order(version)
    result = {}
    for key, history in _configs()[config]["keys"].items():
        defaults = [default for since, default in history if since <= number]
        if defaults and defaults[-1] != BASE:
            result[key] = defaults[-1]
    return result


def composed_tree(version: str, family: Family, configs: tuple[str, ...] = ()) -> dict[str, Plain]:
    """Return a release's default tree with further configurations composed on it, in their order.

    Raises:
        UsageError: The release lacks this tree.
    """
    tree = default_tree(version, family)
    for config in configs:
        changes = _config_changes(version, config)
        # A leaf in the base, such as a null, that the further configuration opens to a block.
        for block in {key for key in tree for changed in changes if changed.startswith(f"{key}.")}:
            del tree[block]
        tree |= changes
    return {key: value for key, value in tree.items() if value != GONE}


def config_keys(config: str) -> tuple[str, ...]:
    """Return every key that a further configuration ever set."""
    return tuple(_configs()[config]["keys"])


def _configs() -> dict[str, dict[str, Any]]:
    return _packed()["configs"]  # type: ignore[return-value]


def all_keys(family: Family) -> tuple[str, ...]:
    """Return every key that a tree ever had."""
    return tuple(_keys(family))


@cache
def known_keys() -> frozenset[str]:
    """Return every key that any tree ever had."""
    of_families = {key for family in get_args(Family) for key in all_keys(family)}
    return frozenset(of_families.union(*(config_keys(config) for config in own_configs())))


def _keys(family: Family) -> dict[str, list[tuple[int, Plain]]]:
    return _packed()["families"][family]["keys"]  # type: ignore[index,call-overload,return-value]
