"""Every key that was set must exist: a removed one says what replaced it, an unknown one names the nearest."""

import difflib
from collections.abc import Mapping, Sequence

from temper_engine_api.errors import ConfigError
from temper_trainer.config.removed_keys import describe_refused_teacher_key, describe_removed_key
from temper_trainer.config_loading.composition import Layer
from temper_trainer.config_loading.schema import ANY_NAME, Entry

SHOWN = 12
"""Problems that are listed; a file of another program has hundreds."""
_SLIP = 0.85
"""Likeness of two names that differ by a letter, such as path and paths (2 * 4 / 9 = 0.89)."""


def check_keys(layers: Sequence[Layer], *, known: Mapping[str, Entry]) -> None:
    """Refuse what does not exist.

    Args:
        layers: what was said, and where.
        known: every dotted key.

    Raises:
        ConfigError: one line per key, with its origin.
    """
    wrong = {
        key: layer.origin
        for layer in layers
        for key in layer.leaves
        if not is_known_key(key, known=known)
    }
    problems = [f"{_refusal(key, known=known)} (set by: {origin})" for key, origin in wrong.items()]
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"and {len(problems) - SHOWN} more."]
    if problems:
        raise ConfigError("\n".join(problems))


def _refusal(key: str, *, known: Mapping[str, Entry]) -> str:
    return (
        describe_removed_key(key)
        or describe_refused_teacher_key(key)
        or f"there is no key {key}: {suggest_keys(key, known=known)}"
    )


def is_known_key(key: str, *, known: Mapping[str, Entry]) -> bool:
    """Whether a key is in the schema, or lies in a mapping whose keys are the user's own."""
    if key in known:
        return True
    parts = key.split(".")
    for length in range(1, len(parts)):
        entry = known.get(".".join(parts[:length]))
        if entry is not None and entry.item is not None:
            parts[length] = ANY_NAME
        elif entry is not None and entry.is_open:
            return True
    return parts[-1] == ANY_NAME or ".".join(parts) in known


def suggest_keys(key: str, *, known: Mapping[str, Entry]) -> str:
    """A sentence with the nearest valid keys: a slip in the name, then the right name in another block, then what resembles it."""
    block, _, name = key.rpartition(".")
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    same_name.sort(
        key=lambda candidate: difflib.SequenceMatcher(a=key, b=candidate).ratio(), reverse=True
    )
    found = (
        _siblings_like(name, block=block, known=known, cutoff=_SLIP)
        or same_name
        or _siblings_like(name, block=block, known=known, cutoff=0.6)
        or difflib.get_close_matches(key, known, n=3, cutoff=0.6)
        or _namesakes_like(name, known=known)
    )
    return (
        f"did you mean {' or '.join(found[:3])}?"
        if found
        else "`temper-train --help` lists them all."
    )


def _siblings_like(
    name: str, *, block: str, known: Mapping[str, Entry], cutoff: float
) -> list[str]:
    prefix = f"{block}." if block else ""
    names = [key.removeprefix(prefix) for key in known if key.startswith(prefix)]
    siblings = [sibling for sibling in names if "." not in sibling]
    return [
        f"{prefix}{match}"
        for match in difflib.get_close_matches(name, siblings, n=2, cutoff=cutoff)
    ]


def _namesakes_like(name: str, *, known: Mapping[str, Entry]) -> list[str]:
    by_name = {key.rpartition(".")[2]: key for key in reversed(list(known))}
    return [by_name[match] for match in difflib.get_close_matches(name, by_name, n=2, cutoff=0.75)]
