"""What other releases that fit as well would have meant, where nobody said which one it was: a difference in behaviour is a hazard."""

from collections.abc import Mapping, Sequence

from temper_legacy_shim.configs.our_defaults import DEFAULTS
from temper_legacy_shim.configs.translation import Setting
from temper_legacy_shim.configs.values import hydra_text

_BEHAVIOUR = (
    *("algorithm.", "sampling.", "run.eval_sampling.", "run.total_", "data.shuffle", "data.overlong_prompts", "use_legacy_worker_impl"),
    *("batching.prompts_per_step", "batching.num_"),
    *(f"{role}.engine.{block}." for role in ("actor", "critic") for block in ("optimizer", "schedule", "lora")),
)
"""Keys, or their beginnings, that carry what a run learns; how fast it runs is not among them."""


def other_meanings(taken: Mapping[str, Setting], others: Mapping[str, Mapping[str, Setting]]) -> list[str]:
    """One clause for each stretch of releases that would have meant something else, oldest first.

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
    return [f"{_named(releases)} would have meant {difference}" for releases, difference in stretches if difference]


def _difference(taken: Mapping[str, Setting], other: Mapping[str, Setting]) -> str:
    keys = [key for key in dict.fromkeys((*other, *taken)) if key.startswith(_BEHAVIOUR)]
    pairs = [(key, _shown(other, key), _shown(taken, key)) for key in keys]
    return ", ".join(f"{key}={theirs} (here {ours})" for key, theirs, ours in pairs if theirs != ours)


def _shown(settings: Mapping[str, Setting], key: str) -> str:
    return hydra_text(settings[key].value if key in settings else DEFAULTS.get(key))


def _named(releases: Sequence[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
