"""Reject keys that do not exist: name the replacement of an old key, or the nearest valid key."""

import difflib
from collections.abc import Mapping, Sequence

from temper_engine_api.errors import ConfigError, EngineNotFoundError
from temper_engine_api.registry import list_engines, load_engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.removed_keys import describe_refused_teacher_key, describe_removed_key
from temper_trainer.config_loading.composition import ENGINE_GROUP, RUN_PREFIX, Layer
from temper_trainer.config_loading.schema import ANY_NAME, Entry, Plain, collect_keys
from temper_trainer.config_loading.variant_choice import TYPO_SIMILARITY, describe_foreign_key

MAX_LISTED_PROBLEMS = 25
"""Maximum number of listed problems: a configuration of another program would have hundreds."""


def check_keys(
    layers: Sequence[Layer], *, known: Mapping[str, Entry], values: dict[str, Plain]
) -> None:
    """Raise if a key does not exist, or belongs to another variant than the chosen one.

    Args:
        layers: The set keys and their origins.
        known: Every dotted key.
        values: The chosen values.

    Raises:
        ConfigError: One line per key, with its origin.
    """
    choices = {key: entry for key, entry in known.items() if entry.choice is not None}
    origins = {key: layer.origin for layer in layers for key in layer.leaves}
    described = {
        key: describe_foreign_key(key, values=values, choices=choices)
        if is_known_key(key, known=known)
        else _describe_problem(key, known=known, engine=str(values.get(ENGINE_GROUP)))
        for key in origins
    }
    problems = [
        f"{problem} (set by: {origins[key]})" for key, problem in described.items() if problem
    ]
    if len(problems) > MAX_LISTED_PROBLEMS:
        problems[MAX_LISTED_PROBLEMS:] = [f"and {len(problems) - MAX_LISTED_PROBLEMS} more."]
    unknown = [key for key in origins if not is_known_key(key, known=known)]
    if any(origins[key].startswith(RUN_PREFIX) for key in unknown):
        problems.append(
            "Another version of Temper wrote this config.yaml, with keys that are gone: start from "
            "your own overrides or file."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _describe_problem(key: str, *, known: Mapping[str, Entry], engine: str) -> str:
    return (
        describe_removed_key(key)
        or describe_refused_teacher_key(key)
        or _describe_key_of_other_engine(key, known=known, engine=engine)
        or f"there is no key {key}: {suggest_keys(key, known=known)}"
    )


def _describe_key_of_other_engine(key: str, *, known: Mapping[str, Entry], engine: str) -> str:
    """Return a sentence for a setting that only another installed engine has, else nothing."""
    block = next((name for name in _list_engine_blocks(known) if key.startswith(f"{name}.")), None)
    if block is None:
        return ""
    setting = key.removeprefix(f"{block}.")
    owners = [
        entry.name
        for entry in list_engines()
        if entry.name != engine and setting in _collect_engine_settings(entry.name)
    ]
    return (
        f"{key} is a setting of the engine {' and '.join(owners)}, but {ENGINE_GROUP} is {engine}: "
        f"remove it, or set {ENGINE_GROUP}={owners[0]}."
        if owners
        else ""
    )


def _list_engine_blocks(known: Mapping[str, Entry]) -> list[str]:
    """Return the blocks, such as actor.engine, whose keys the chosen engine defines."""
    return [
        key
        for key, entry in known.items()
        if entry.block is not None and issubclass(entry.block, EngineConfig)
    ]


def _collect_engine_settings(name: str) -> Mapping[str, Entry]:
    try:
        cls = load_engine_config_class(name)
    except EngineNotFoundError:
        # An engine that cannot be chosen has no setting to suggest.
        return {}
    return collect_keys(cls, engine_class=cls)


def is_known_key(key: str, *, known: Mapping[str, Entry]) -> bool:
    """Return True if a key is in the schema, or in a mapping with user-chosen keys."""
    if key in known:
        return True
    parts = key.split(".")
    for length in range(1, len(parts)):
        entry = known.get(".".join(parts[:length]))
        if entry is not None and entry.item is not None:
            # The user chose this name, so the schema has a placeholder for it.
            parts[length] = ANY_NAME
        elif entry is not None and entry.is_open:
            return True
    return parts[-1] == ANY_NAME or ".".join(parts) in known


def suggest_keys(key: str, *, known: Mapping[str, Entry]) -> str:
    """Return a sentence with the nearest valid keys.

    The order is: a typo in the last component, the same name in another block, then similar names.
    """
    block, _, name = key.rpartition(".")
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    # The optimizers of all models have the same keys. Without a block, most users mean the actor's.
    same_name.sort(
        key=lambda candidate: (
            not block and candidate.startswith("actor.engine.optimizer."),
            difflib.SequenceMatcher(a=key, b=candidate).ratio(),
        ),
        reverse=True,
    )
    # Ordered by how likely the guess is.
    matches = (
        _find_similar_siblings(name, block=block, known=known, cutoff=TYPO_SIMILARITY)
        or same_name
        or _find_similar_siblings(name, block=block, known=known, cutoff=0.6)
        or difflib.get_close_matches(key, known, n=3, cutoff=0.6)
        or _find_similar_names(name, known=known)
    )
    return (
        f"did you mean {' or '.join(matches[:3])}?"
        if matches
        else "`temper-train --help` lists them all."
    )


def _find_similar_siblings(
    name: str, *, block: str, known: Mapping[str, Entry], cutoff: float
) -> list[str]:
    prefix = f"{block}." if block else ""
    names = [key.removeprefix(prefix) for key in known if key.startswith(prefix)]
    siblings = [sibling for sibling in names if "." not in sibling]
    return [
        f"{prefix}{match}"
        for match in difflib.get_close_matches(name, siblings, n=2, cutoff=cutoff)
    ]


def _find_similar_names(name: str, *, known: Mapping[str, Entry]) -> list[str]:
    by_name = {key.rpartition(".")[2]: key for key in reversed(list(known))}
    return [by_name[match] for match in difflib.get_close_matches(name, by_name, n=2, cutoff=0.75)]
