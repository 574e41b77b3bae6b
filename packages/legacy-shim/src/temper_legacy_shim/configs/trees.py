"""The default tree of every old release: what a key was, where nobody said otherwise. Facts, from ``data/trees.json``."""

import json
import re
from functools import cache
from importlib import resources
from typing import Literal, get_args

from temper_legacy_shim.configs.values import Plain
from temper_legacy_shim.errors import UsageError

Family = Literal["ppo_fsdp", "ppo_megatron", "sft_columns", "sft_fsdp", "sft_megatron", "generation", "evaluation"]
"""Which tree: PPO on FSDP or Megatron; SFT of the first generation (columns) and of the second (on engines); generation; evaluation."""

GONE = {"$gone": True}


@cache
def _packed() -> dict[str, Plain]:
    text = resources.files("temper_legacy_shim.configs").joinpath("data/trees.json").read_text(encoding="utf-8")
    packed: dict[str, Plain] = json.loads(text)
    return packed


@cache
def versions() -> tuple[str, ...]:
    """Every release with trees of its own, oldest first."""
    found = _packed()["versions"]
    assert isinstance(found, list)
    return tuple(str(version) for version in found)


def known_version(text: str) -> str:
    """The release whose trees serve a version: ``0.7``, ``v0.7.1``, ``v0.4.0.post3``; between two releases, the earlier one.

    Raises:
        UsageError: it is no version, or lies outside v0.2 to v0.9.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(post|rc|dev)(\d+))?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no version: give one such as v0.7.1, from {versions()[0]} to {versions()[-1]}.")
    wanted = _number(match)
    if wanted[:2] < (0, 2) or wanted[:2] > (0, 9):
        raise UsageError(f"{text} is outside of what is known: give one from {versions()[0]} to {versions()[-1]}.")
    if match[3] is None and match[4] is None:  # v0.4 means the last of its line
        wanted = (*wanted[:2], 99, 99)
    return [version for version in versions() if _parsed(version) <= wanted or version == versions()[0]][-1]


def _parsed(version: str) -> tuple[int, int, int, int]:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(post|rc|dev)(\d+))?", version)
    assert match is not None
    return _number(match)


def _number(match: re.Match[str]) -> tuple[int, int, int, int]:
    patch = int(match[3] or 0)
    post = {None: 0, "post": 1 + int(match[5] or 0), "rc": 0, "dev": 0}[match[4]]
    return int(match[1]), int(match[2]), patch, post


def order(version: str) -> int:
    """Position of a known release: what "since v0.4.0" compares."""
    return versions().index(version)


def families_of(version: str) -> tuple[Family, ...]:
    """The trees that a release had."""
    families = _packed()["families"]
    assert isinstance(families, dict)
    number = order(version)
    return tuple(name for name, block in families.items() if number in block["present"])  # type: ignore[misc,index,operator,call-overload]


@cache
def history_of(family: Family, key: str) -> tuple[tuple[str, Plain], ...]:
    """Releases at which a key's default changed, each with the default from there on; GONE where it was removed."""
    history = _keys(family).get(key, [])
    return tuple((versions()[number], value) for number, value in history)


def default_tree(version: str, family: Family) -> dict[str, Plain]:
    """Leaves by dotted key; interpolations as they were written.

    Raises:
        UsageError: the release had no such tree.
    """
    if family not in families_of(version):
        had = ", ".join(families_of(version))
        raise UsageError(f"{version} had no configuration of the kind {family}: it had {had}. Give another version.")
    return dict(_tree(version, family))


@cache
def _tree(version: str, family: Family) -> dict[str, Plain]:
    number = order(version)
    tree: dict[str, Plain] = {}
    for key, history in _keys(family).items():
        value: Plain = GONE  # type: ignore[assignment]
        for since, default in history:
            if since > number:
                break
            value = default
        if value != GONE:
            tree[key] = value
    return tree


def all_keys(family: Family) -> tuple[str, ...]:
    """Every key that a tree ever had."""
    return tuple(_keys(family))


@cache
def known_keys() -> frozenset[str]:
    """Every key that any tree ever had."""
    return frozenset(key for family in get_args(Family) for key in all_keys(family))


def _keys(family: Family) -> dict[str, list[tuple[int, Plain]]]:
    return _packed()["families"][family]["keys"]  # type: ignore[index,call-overload,return-value]
