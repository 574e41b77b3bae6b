"""Determine the release of a configuration from its keys, with the evidence."""

from collections.abc import Mapping, Sequence
from functools import cache

from temper_legacy_shim.configs.mapping.builder import trainer_defaults
from temper_legacy_shim.configs.reading.config_values import Override, Plain, hydra_text
from temper_legacy_shim.configs.reading.entry_points import GROUPS
from temper_legacy_shim.configs.reading.trees import (
    Family,
    composed_tree,
    families_of,
    releases_of,
    releases_of_program,
    versions,
)
from temper_legacy_shim.configs.translation import Setting

_MOST_SHOWN = 4


def infer_version(
    overrides: Sequence[Override],
    *,
    family: Family,
    configs: tuple[str, ...],
    entry: str,
    given: dict[str, Plain],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the releases that refuse the fewest keys, oldest first, and why.

    The newest of them counts. Between releases that lack equally many keys, those decide that came
    later: a script may keep old keys, but cannot know new ones. A fork may have adopted them, so
    they decide nothing next to keys that no release has. A superfluous ``+`` decides last.

    Args:
        overrides: of the command line.
        family: which tree; a release without it is no candidate.
        configs: further configurations of the entry; a release without them is no candidate.
        entry: module; a release without it is no candidate if another one has it.
        given: leaves of the user's own file.
    """
    candidates = releases_with(family, configs, entry)
    counts = {
        version: _refusals(overrides, given, version=version, family=family, configs=configs)
        for version in candidates
    }
    lacking = {
        version: {key for key in keys if not key.startswith("+")}
        for version, keys in counts.items()
    }
    is_fork = bool(set.intersection(*lacking.values()))
    ranks = {}
    for position, version in enumerate(candidates):
        earlier = [lacking[before] for before in candidates[:position]]
        newer = set() if is_fork else lacking[version].intersection(*earlier)
        ranks[version] = (len(lacking[version]), len(newer), len(counts[version]))
    fewest = min(ranks.values())
    best = [version for version in candidates if ranks[version] == fewest]
    taken = best[-1]
    evidence = [
        f"{best[0]} to {taken} take its keys; the newest counts"
        if len(best) > 1
        else f"only {taken} takes its keys",
    ]
    if counts[taken]:
        evidence.append(f"even {taken} refuses {', '.join(sorted(counts[taken])[:_MOST_SHOWN])}")
    evidence += _bounds(counts, best, candidates)
    return tuple(best), tuple(evidence)


def releases_with(family: Family, configs: tuple[str, ...], entry: str) -> list[str]:
    """Return the releases that have a tree, all further configurations and the program.

    The program counts if it is one of verl's package. The oldest release comes first.
    """
    having = [set(releases_of(config)) for config in configs]
    if releases_of_program(entry):
        having.append(set(releases_of_program(entry)))
    return [
        version
        for version in versions()
        if family in families_of(version) and all(version in each for each in having)
    ]


def _bounds(counts: dict[str, set[str]], best: list[str], candidates: list[str]) -> list[str]:
    """Describe the keys that the releases next to the range reject."""
    result = []
    first, last = candidates.index(best[0]), candidates.index(best[-1])
    for number, side in ((first - 1, "before"), (last + 1, "after")):
        if 0 <= number < len(candidates):
            more = sorted(counts[candidates[number]] - counts[best[-1]])[:_MOST_SHOWN]
            if more:
                result.append(f"{candidates[number]}, {side} it, refuses {', '.join(more)}")
    return result


def _refusals(
    overrides: Sequence[Override],
    given: dict[str, Plain],
    *,
    version: str,
    family: Family,
    configs: tuple[str, ...],
) -> set[str]:
    """Return the keys that the release's tree does not take in the way they are written."""
    leaves, blocks = _shape(version, family, configs)
    refused = {key for key in given if key not in leaves and key not in blocks}
    for override in overrides:
        key = override.key
        if override.kind != "set" or override.prefix in ("++", "~") or key in GROUPS or "@" in key:
            continue
        is_there = key in leaves or key in blocks
        if override.prefix == "+" and key in leaves and leaves[key] is not None:
            refused.add(f"+{key}")
        if (override.prefix == "" and not is_there) or (key in blocks and override.is_no_block):
            refused.add(key)
    return refused


@cache
def _shape(
    version: str, family: Family, configs: tuple[str, ...]
) -> tuple[dict[str, Plain], frozenset[str]]:
    leaves = composed_tree(version, family, configs)
    blocks = {
        ".".join(parts[:count])
        for parts in (key.split(".") for key in leaves)
        for count in range(1, len(parts))
    }
    return leaves, frozenset(blocks)


_BEHAVIOUR = (
    *(
        "algorithm.",
        "sampling.",
        "run.eval_sampling.",
        "run.total_",
        "data.shuffle",
        "data.overlong_prompts",
        "use_legacy_worker_impl",
    ),
    *("batching.prompts_per_step", "batching.num_"),
    *(
        f"{role}.engine.{block}."
        for role in ("actor", "critic")
        for block in ("optimizer", "schedule", "lora")
    ),
)
"""Keys and prefixes that affect the result of training, not only the speed."""


def other_meanings(
    taken: Mapping[str, Setting], others: Mapping[str, Mapping[str, Setting]]
) -> list[str]:
    """Describe each range of releases that gives the keys another meaning, oldest first.

    Args:
        taken: the settings of the release that counts.
        others: settings by release, of those that take the keys as well, oldest first.
    """
    stretches: list[tuple[list[str], str]] = []
    for release, settings in others.items():
        difference = _difference(taken, settings)
        if stretches and stretches[-1][1] == difference:
            stretches[-1][0].append(release)
        else:
            stretches.append(([release], difference))
    return [
        f"{_named(releases)} would have meant {difference}"
        for releases, difference in stretches
        if difference
    ]


def _difference(taken: Mapping[str, Setting], other: Mapping[str, Setting]) -> str:
    keys = [key for key in dict.fromkeys((*other, *taken)) if key.startswith(_BEHAVIOUR)]
    pairs = [(key, _shown(other, key), _shown(taken, key)) for key in keys]
    return ", ".join(
        f"{key}={others} (here {target})" for key, others, target in pairs if others != target
    )


def _shown(settings: Mapping[str, Setting], key: str) -> str:
    return hydra_text(settings[key].value if key in settings else trainer_defaults().get(key))


def _named(releases: Sequence[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
