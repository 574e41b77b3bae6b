"""Old YAML files: a user's own with ``defaults:``, a resolved dump, or a copy of an old default file; many of them in a folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from temper_legacy_shim.configs.values import Plain, flatten
from temper_legacy_shim.errors import DamagedFileError, UsageError

_OVERRIDE = re.compile(r"(?:\+\+?|~)?[A-Za-z_][\w/@.]*=|~[A-Za-z_]")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldFile:
    """One file as its user wrote it."""

    path: Path
    """Where it lies."""
    values: dict[str, Plain]
    """Nested values, files of the user's own that it builds on included."""
    entry: str = ""
    """The program that its defaults list names, as far as it says so."""
    groups: dict[str, str] = field(default_factory=dict)
    """Engine groups that its defaults list chooses."""
    overrides: tuple[str, ...] = ()
    """Of a file that is Hydra's record of a command line, ``.hydra/overrides.yaml``."""


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
    """The file itself, or every YAML file below a folder, in order.

    Raises:
        UsageError: there is none.
    """
    if path.is_dir():
        found = sorted(item for item in path.rglob("*") if item.suffix in _SUFFIXES and item.is_file())
        if not found:
            raise UsageError(f"{path} holds no YAML file: give a file or a folder with old configurations.")
        return found
    if not path.exists():
        raise UsageError(f"{path} is not there: give a YAML file or a folder with some.")
    return [path]


def read_old_file(path: Path, *, seen: tuple[Path, ...] = ()) -> OldFile:
    """Read one file, and the files beside it that its defaults list names.

    Args:
        path: the file.
        seen: files that led here; a circle is an error.

    Raises:
        DamagedFileError: it is not YAML, or no mapping, or builds on itself.
    """
    if path.resolve() in seen:
        raise DamagedFileError(f"{path} builds on itself through its defaults list: take one of the entries out.")
    loaded = _load(path)
    if isinstance(loaded, list):
        return OldFile(path=path, values={}, overrides=tuple(loaded))
    tree = loaded
    defaults = tree.pop("defaults", None)
    tree.pop("hydra", None)
    values: dict[str, Plain] = {}
    entry, groups = "", {}
    for item in defaults if isinstance(defaults, list) else []:
        name, choice = _default(item)
        if name in ("model_engine", "engine", "optim"):
            groups[name] = choice
        elif not name and choice.rpartition("/")[2] in _BASES:
            entry = choice.rpartition("/")[2]
        elif not name and choice != "_self_" and (path.parent / f"{choice}.yaml").is_file():
            below = read_old_file(path.parent / f"{choice}.yaml", seen=(*seen, path.resolve()))
            values = _merged(values, below.values)
            entry, groups = below.entry or entry, {**below.groups, **groups}
    own = path.stem if path.stem in _BASES else ""
    if own and not _BASES[own].startswith("verl.trainer."):
        entry = own  # a recipe's own file, whatever it builds on
    return OldFile(path=path, values=_merged(values, tree), entry=entry or own, groups=groups)


def read_if_old(path: Path) -> OldFile | None:
    """A file of a folder: None where it is no old configuration.

    Raises:
        DamagedFileError: it speaks of an old configuration, and can't be read.
    """
    try:
        old = read_old_file(path)
    except DamagedFileError:
        if "actor_rollout_ref" in path.read_text(encoding="utf-8", errors="replace"):
            raise
        return None
    return old if old.overrides or is_old(old.values) else None


def entry_of(base: str) -> str:
    """The program whose default file that is."""
    return _BASES.get(base, "")


def _load(path: Path) -> dict[str, Plain] | list[str]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DamagedFileError(f"{path} is not YAML: {' '.join(str(error).split())}. Mend it there.") from error
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedFileError(f"{path} can't be read ({type(error).__name__}: {error}): a YAML text file is expected.") from error
    if tree is None:
        return {}
    if isinstance(tree, list) and tree and all(isinstance(item, str) and _OVERRIDE.match(item) for item in tree):
        return tree
    if not isinstance(tree, dict):
        raise DamagedFileError(f"{path} is a {type(tree).__name__}, but an old configuration is a mapping of keys.")
    return {str(key): _plain(value) for key, value in tree.items()}


def _plain(value: object) -> Plain:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _number(value)
    return value if isinstance(value, int | float | bool) or value is None else str(value)


def _number(text: str) -> Plain:
    """OmegaConf's loader reads 1e-6 as a number, YAML 1.1 as text."""
    from temper_legacy_shim.configs.values import scalar

    value = scalar(text) if text and (text[0].isdigit() or text[0] in "+-.") else text
    return value if isinstance(value, float) else text


def _default(item: object) -> tuple[str, str]:
    """(group, choice) of one entry of a defaults list; a file has no group."""
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, choice),) = item.items()
        return str(name).removeprefix("override").strip().lstrip("/").partition("@")[0], str(choice)
    return "", str(item).lstrip("/").partition("@")[0]


def _merged(below: dict[str, Plain], above: dict[str, Plain]) -> dict[str, Plain]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def is_old(values: Mapping[str, Plain]) -> bool:
    """Whether a file looks like an old configuration at all."""
    blocks = {"actor_rollout_ref", "trainer", "critic", "optim", "rollout", "reward_model", "algorithm", "engine", "custom_reward_function"}
    return bool(blocks & values.keys()) or any(key.startswith("data.") for key in flatten(dict(values)))
