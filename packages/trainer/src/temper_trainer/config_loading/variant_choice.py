"""Choose variants across files and overrides: another choice drops the former one's settings."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from temper_engine_api.specs import EngineConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import ANY_NAME, Entry, Plain, collect_keys, list_classes

Tree = dict[str, Plain]

TYPO_SIMILARITY = 0.85
"""Names at least this similar are taken for typing errors.

difflib's similarity of path and paths, which differ by one letter, is 2 * 4 / 9 = 0.89.
"""


def collect_choices() -> dict[str, Entry]:
    """Return the fields that choose a variant, by dotted key; user-chosen names are ``NAME``."""
    known = collect_keys(TrainerConfig, engine_class=EngineConfig)
    return {key: entry for key, entry in known.items() if entry.choice is not None}


def expand_names(tree: Tree, *, choices: Mapping[str, Entry]) -> None:
    """Replace each variant that is given by its name alone by a block with that name."""
    for parent, name, _ in _iterate_choices(tree, choices=choices):
        value = parent[name]
        # An interpolation is resolved later, to a name or a block.
        if isinstance(value, str) and not value.startswith("${"):
            parent[name] = {"name": value}


def find_names(tree: Tree, *, choices: Mapping[str, Entry]) -> dict[str, Plain]:
    """Return the variant names that a tree gives, by the block's dotted key."""
    blocks = {key: parent[name] for parent, name, key in _iterate_choices(tree, choices=choices)}
    return {
        key: block["name"]
        for key, block in blocks.items()
        if isinstance(block, dict) and "name" in block
    }


def drop_former_variants(
    trees: Sequence[Tree], *, names: Mapping[str, Plain], choices: Mapping[str, Entry]
) -> list[str]:
    """Delete from earlier trees the blocks of variants that another choice replaces.

    Args:
        trees: In order of precedence; later ones win. They are changed.
        names: Names that the next tree gives, by the block's dotted key.
        choices: See ``collect_choices``.

    Returns:
        The dotted keys of the deleted blocks.
    """
    former: dict[str, Plain] = {key: get_default_name(key, choices=choices) for key in names}
    for tree in trees:
        former |= find_names(
            tree, choices={key: choices[_to_pattern(key, choices)] for key in names}
        )
    replaced = [key for key, name in names.items() if former[key] != name]
    for key in replaced:
        _delete_block(key, trees=trees)
    return replaced


def get_default_name(key: str, *, choices: Mapping[str, Entry]) -> str | None:
    """Return the name of the variant that is used when nothing chooses one."""
    return choices[_to_pattern(key, choices)].default_variant


def is_choice(key: str, *, choices: Mapping[str, Entry]) -> bool:
    """Return True if a dotted key is a variant's block."""
    return _to_pattern(key, choices) in choices


def describe_foreign_key(key: str, *, values: Tree, choices: Mapping[str, Entry]) -> str | None:
    """Return why a key of another variant than the chosen one is refused, else None.

    Args:
        key: Dotted key that some variant has.
        values: The chosen values.
        choices: See ``collect_choices``.
    """
    parts = key.split(".")
    for length in range(1, len(parts)):
        block, setting = ".".join(parts[:length]), parts[length]
        entry = choices.get(_to_pattern(block, choices))
        if entry is None or entry.choice is None or setting == "name":
            continue
        chosen_values = _find_value(values, block)
        # A later layer may have removed the key, or replaced the block by null.
        if not isinstance(chosen_values, dict) or setting not in chosen_values:
            continue
        name = chosen_values.get("name", entry.default_variant)
        chosen = entry.choice.find_class(name)
        own_names = [] if chosen is None else [each.name for each in fields(chosen)]
        if chosen is None or setting in own_names:
            continue
        owners = [
            owner
            for owner, cls in list_classes(entry.choice).items()
            if setting in {each.name for each in fields(cls)}
        ]
        near = difflib.get_close_matches(setting, own_names, n=1, cutoff=TYPO_SIMILARITY)
        return (
            f"{key} is a setting of {', '.join(owners)}, but {block} is {name}"
            f"{f', which has {block}.{near[0]}' if near else ''}: remove it, or set "
            f"{block}={owners[0]}{' or another of these' if len(owners) > 1 else ''}."
        )
    return None


def _delete_block(key: str, *, trees: Sequence[Tree]) -> None:
    parent, _, last = key.rpartition(".")
    for tree in trees:
        block = _find_value(tree, parent) if parent else tree
        if isinstance(block, dict):
            block.pop(last, None)


def _find_value(tree: Tree, key: str) -> Plain:
    """Return the value at a dotted key; None if there is none."""
    value: Plain = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _to_pattern(key: str, choices: Mapping[str, Entry]) -> str:
    """Return the key of ``choices`` that a dotted key matches, or the key itself."""
    parts = key.split(".")
    return next(
        (
            pattern
            for pattern in choices
            if len(parts) == len(names := pattern.split("."))
            and all(name in (part, ANY_NAME) for part, name in zip(parts, names, strict=True))
        ),
        key,
    )


def _iterate_choices(
    tree: Tree, *, choices: Mapping[str, Entry]
) -> Iterator[tuple[Tree, str, str]]:
    """Yield (parent block, name, dotted key) for each variant in a tree."""
    for pattern in choices:
        matches = [(tree, "", "")]
        for part in pattern.split("."):
            matches = [
                (block, name, f"{path}.{name}".lstrip("."))
                for parent, last, path in matches
                if isinstance(block := parent[last] if last else parent, dict)
                for name in (list(block) if part == ANY_NAME else [part])
                if name in block
            ]
        yield from matches
