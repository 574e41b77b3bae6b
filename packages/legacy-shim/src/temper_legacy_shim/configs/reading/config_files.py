"""Old YAML files: a user's own, a resolved dump, or a copy of an old default file."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from temper_legacy_shim.configs.mapping.builder import Numerics
from temper_legacy_shim.configs.reading.config_values import Plain, flatten
from temper_legacy_shim.configs.reading.defaults_lists import compose_file
from temper_legacy_shim.configs.reading.entry_points import num_known_keys, other_system
from temper_legacy_shim.configs.translate import translate
from temper_legacy_shim.configs.translation import Cluster, Finding, Translation
from temper_legacy_shim.errors import DamagedFileError, UsageError

_OVERRIDE = re.compile(r"(?:\+\+?|~)?[A-Za-z_][\w/@.]*=|~[A-Za-z_]")
_SUFFIXES = (".yaml", ".yml")
DEFAULTS_LIST = "defaults-list"
"""Rule of findings about a file; it is not in the table of rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldFile:
    """A file of the user, before composition."""

    path: Path
    values: dict[str, Plain]
    """Nested values, files of the user's own it builds on included."""
    entry: str = ""
    """The program, if the defaults list shows it."""
    groups: dict[str, str] = field(default_factory=dict)
    """Engine groups that its defaults list chooses."""
    overrides: tuple[str, ...] = ()
    """Overrides of a file that is Hydra's record of a command line, ``.hydra/overrides.yaml``."""
    parts: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    """Missing or ineffective files it builds on, a sentence each."""


_BASES = {
    "ppo_trainer": "verl.trainer.main_ppo",
    "ppo_megatron_trainer": "verl.trainer.main_ppo",
    "sft_trainer": "verl.trainer.fsdp_sft_trainer",
    "sft_trainer_engine": "verl.trainer.sft_trainer",
    "generation": "verl.trainer.main_generation",
    "evaluation": "verl.trainer.main_eval",
    "dapo_trainer": "recipe.dapo.main_dapo",
    "entropy_trainer": "recipe.entropy.main_entropy",
    "one_step_off_ppo_trainer": "verl.experimental.one_step_off_policy.main_ppo",
    "one_step_off_ppo_megatron_trainer": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async_ppo_trainer": "verl.experimental.fully_async_policy.fully_async_main",
    "fully_async_ppo_megatron_trainer": "verl.experimental.fully_async_policy.fully_async_main",
    "prime_trainer": "recipe.prime.main_prime",
    "spin_trainer": "recipe.spin.main_spin",
    "sppo_trainer": "recipe.sppo.main_sppo",
}


def find_files(path: Path) -> list[Path]:
    """Return the file itself, or every YAML file below a folder, in order.

    Raises:
        UsageError: there is none.
    """
    if path.is_dir():
        result = sorted(
            item for item in path.rglob("*") if item.suffix in _SUFFIXES and item.is_file()
        )
        if not result:
            raise UsageError(
                f"{path} holds no YAML file: give a file or a folder with old configurations."
            )
        return result
    if not path.exists():
        raise UsageError(f"{path} is not there: give a YAML file or a folder with some.")
    return [path]


def read_old_file(path: Path) -> OldFile:
    """Load a file, and the user's files in the defaults list.

    Raises:
        DamagedFileError: it is not YAML, or no mapping, or builds on itself.
    """
    loaded = _load(path)
    if isinstance(loaded, list):
        return OldFile(path=path, values={}, overrides=tuple(loaded))
    result = compose_file(path, load=_load_mapping, bases=_BASES)
    own = path.stem if path.stem in _BASES else ""
    entry = result.base or own
    if own and not _BASES[own].startswith("verl.trainer."):
        entry = own  # a recipe's own file, whatever it builds on
    return OldFile(
        path=path,
        values=result.values,
        entry=entry,
        groups=result.groups,
        parts=tuple(result.parts),
        missing=tuple(result.missing),
    )


def read_if_old(path: Path) -> OldFile | None:
    """Return a file of a folder: None if it is no old configuration.

    Raises:
        DamagedFileError: it mentions an old configuration, but cannot be parsed.
    """
    try:
        old = read_old_file(path)
    except DamagedFileError:
        if "actor_rollout_ref" in path.read_text(encoding="utf-8", errors="replace"):
            raise
        return None
    return old if old.overrides or (is_old(old.values) and not _foreign_reason(old)) else None


def translate_file(
    old: OldFile,
    overrides: Sequence[str] = (),
    *,
    entry: str = "",
    config_name: str | None = None,
    version: str | None = None,
    cluster: Cluster | None = None,
    numerics: Numerics = "temper",
) -> Translation:
    """Translate a file with overrides on top; see ``translate``. The file fills empty arguments."""
    refuse_other_systems(old)
    given = {token.partition("=")[0] for token in overrides}
    groups = [f"{group}={choice}" for group, choice in old.groups.items() if group not in given]
    translation = translate(
        [*groups, *old.overrides, *overrides],
        entry=entry or entry_of(old.entry),
        config_name=config_name or old.entry or None,
        version=version,
        cluster=cluster,
        numerics=numerics,
        base=old.values,
    )
    return with_missing(translation, old)


def refuse_other_systems(old: OldFile) -> None:
    """Refuse a file that is no configuration of verl.

    Raises:
        UsageError: The file belongs to another system, or hardly has a key of any release.
    """
    reason = _foreign_reason(old)
    if reason:
        raise UsageError(f"{old.path} {reason}")


def _foreign_reason(old: OldFile) -> str:
    """Return why a file is no configuration of verl; empty if it may be one."""
    system = other_system(old.values)
    if system:
        return f"is a configuration of {system} and not of verl, so nothing of it is translated."
    # Only verl's files have these, so that forks with many keys of their own are accepted.
    if old.entry or old.parts or old.missing or old.overrides or "actor_rollout_ref" in old.values:
        return ""
    if not old.values:
        return "is empty: give the configuration that the old run was started with."
    num_known, num_keys = num_known_keys(old.values)
    # Any system may have a key such as trainer.project_name, and forks of verl add keys. Where most
    # keys are unknown, the defaults of verl would decide the run.
    if num_known and num_known >= num_keys / 2:
        return ""
    names = ", ".join(list(old.values)[:4])
    counts = f"has {num_keys} keys, and only {num_known}" if num_known else "has no key"
    return (
        f"{counts} of any verl release ({names}): give the configuration that the old run was "
        "started with."
    )


def with_missing(translation: Translation, old: OldFile) -> Translation:
    """Add a question for each file that the translated file needs and that was not found."""
    stated = tuple(
        Finding(level="person", rule=DEFAULTS_LIST, message=f"{sentence}.")
        for sentence in old.missing
    )
    return (
        replace(translation, findings=(*stated, *translation.findings)) if stated else translation
    )


def old_files(path: Path) -> list[OldFile]:
    """Return the file itself, or the old configurations below a folder.

    Files that another file includes are not listed separately.

    Raises:
        UsageError: there is no YAML file.
        DamagedFileError: a file mentions an old configuration, but cannot be parsed.
    """
    result = find_files(path)
    return (
        [read_old_file(path)]
        if result == [path]
        else drop_included_files([old for each in result if (old := read_if_old(each)) is not None])
    )


def drop_included_files(result: Sequence[OldFile]) -> list[OldFile]:
    parts = {part.resolve() for old in result for part in old.parts}
    return [old for old in result if old.path.resolve() not in parts]


def entry_of(base: str) -> str:
    """Return the program whose default file that is."""
    return _BASES.get(base, "")


def _load(path: Path) -> dict[str, Plain] | list[str]:
    """Read a YAML file: a mapping, or a list of overrides as Hydra saves them in overrides.yaml."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is twice in a mapping, as OmegaConf's loader does."""

        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Hashable, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} is there twice, which the old system refused",
                        problem_mark=key.start_mark,
                    )
                seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep=deep)

    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise DamagedFileError(
            f"{path} is not YAML: {' '.join(str(error).split())}. Fix it there."
        ) from error
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedFileError(
            f"{path} can't be read ({type(error).__name__}: {error}): a YAML text file is expected."
        ) from error
    if tree is None:
        return {}
    if (
        isinstance(tree, list)
        and tree
        and all(isinstance(item, str) and _OVERRIDE.match(item) for item in tree)
    ):
        return tree
    if not isinstance(tree, dict):
        raise DamagedFileError(
            f"{path} is a {type(tree).__name__}, but an old configuration is a mapping of keys."
        )
    try:
        return {str(key): _plain(value) for key, value in tree.items()}
    except RecursionError as error:
        raise DamagedFileError(
            f"{path} has a value that contains itself: take the alias (*NAME) out of it."
        ) from error


def _load_mapping(path: Path) -> dict[str, Plain]:
    loaded = _load(path)
    if isinstance(loaded, list):
        raise DamagedFileError(
            f"{path} is a list, but a file of a defaults list is a mapping of keys."
        )
    return loaded


def _plain(value: object) -> Plain:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _number(value)
    return value if isinstance(value, int | float | bool) or value is None else str(value)


def _number(text: str) -> Plain:
    """Return OmegaConf's loader reads 1e-6 as a number, YAML 1.1 as text."""
    from temper_legacy_shim.configs.reading.config_values import scalar

    value = scalar(text) if text and (text[0].isdigit() or text[0] in "+-.") else text
    return value if isinstance(value, float) else text


def is_old(values: Mapping[str, Plain]) -> bool:
    """Check if a file looks like an old configuration."""
    blocks = {
        "actor_rollout_ref",
        "trainer",
        "critic",
        "optim",
        "rollout",
        "reward_model",
        "algorithm",
        "engine",
        "custom_reward_function",
    }
    return bool(blocks & values.keys()) or any(
        key.startswith("data.") for key in flatten(dict(values))
    )
