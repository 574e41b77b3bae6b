"""Hydra's part: from group choices, YAML files and command-line overrides to one mapping, and which layer said what.

Only what was chosen goes through here; defaults are laid underneath afterwards, from the dataclasses. Hydra's loader is used without its
global state, so that loading a configuration in a process leaves nothing behind.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_engine_api.errors import ConfigError
from temper_trainer.config.removed_keys import OLD_CONFIG, OLD_CONFIGS
from temper_trainer.config_loading.schema import Plain, flatten, to_plain

OURS = "pkg://temper_trainer.conf"
"""Where the choices that come with the trainer lie."""
ENGINE_GROUP = "model_engine"
"""The group whose choices need no file: any installed engine is one."""
PRIMARY = "temper"
"""The file that a composition begins with, unless the user names another."""
COMMAND_LINE = "command line"
"""Origin of an override."""
FILE, RUN = "file ", "run "
"""Origins, before the path, of what stands in a file of the user's, and in the ``config.yaml`` that an earlier run has left."""
DIGEST = "# digest "
"""Begins what a run leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one file, group choice or override says."""

    origin: str
    """``group NAME=CHOICE``, ``file PATH`` or ``command line``."""
    leaves: tuple[str, ...]
    """Dotted keys it gives a value, in order."""
    is_deletion: bool = False
    """Whether it takes its keys away instead, back to their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """Everything that was chosen."""

    values: dict[str, Plain]
    """Nested; interpolations are not resolved yet."""
    layers: tuple[Layer, ...]
    """Later ones win."""


def compose(overrides: Sequence[str], *, config_dir: str | None, config_name: str) -> Composition:
    """Compose choices; no key is checked here except for Hydra's own grammar.

    Raises:
        ConfigError: an override that cannot be parsed, a group without that choice, a missing or malformed file.
    """
    version.setbase("1.3")
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(
            f"--config-dir {config_dir} is not a directory: give the folder that holds your YAML files."
        )
    repository = _repository(config_dir)
    parsed = [_parse(text) for text in overrides]
    forced = [
        _parse(text) for override in parsed for text in _forced(override, repository=repository)
    ]
    try:
        # Without Hydra's own settings (its run folders, logging, launchers), which nobody here reads.
        chosen = create_defaults_list(
            repository, config_name, forced, prepend_hydra=False, skip_missing=False
        )
        files = [_load_file(default, repository=repository) for default in chosen.defaults]
        composed = OmegaConf.merge({}, *(tree for tree, _ in files))
        ConfigLoaderImpl._apply_overrides_to_config(chosen.config_overrides, composed)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_sentence(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error, repository=repository)) from error
    assert isinstance(composed, DictConfig)
    values = to_plain_tree(composed)
    for override in parsed:
        if _is_bare_engine(override, repository=repository):
            values[ENGINE_GROUP] = str(override.value())
    layers = (*(layer for _, layer in files), *_override_layers(parsed, repository=repository))
    return Composition(values=values, layers=layers)


def group_choices(group: str, *, config_dir: str | None = None) -> list[str]:
    """The choices of a config group, the user's own included."""
    return list(_repository(config_dir).get_group_options(group))


def to_plain_tree(config: DictConfig, *, resolve: bool = False) -> dict[str, Plain]:
    """A composed mapping as to_plain values, with or without its interpolations resolved."""
    tree = to_plain(OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve))
    assert isinstance(tree, dict)
    return tree


def _repository(config_dir: str | None) -> CachingConfigRepository:
    """The user's folder first, so that a file of theirs wins over ours of the same name."""
    path = create_config_search_path(OURS)
    if config_dir is not None:
        path.prepend("user", f"file://{Path(config_dir).resolve()}", "main")
    return CachingConfigRepository(ConfigRepository(path))


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read {text!r} on the command line: {_one_line(error)} Write KEY=VALUE, ~KEY to go back to a default, or "
            "GROUP=CHOICE; quote texts with special characters, 'key=\"a, b\"'."
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{text} gives several values for one run: write a list as [a,b], a text with a comma as 'key=\"a,b\"'."
        )
    return override


def _is_group(override: Override, *, repository: CachingConfigRepository) -> bool:
    return bool(repository.group_exists(override.key_or_group))


def _forced(override: Override, *, repository: CachingConfigRepository) -> list[str]:
    """The override as Hydra shall see it: every key may be set, whether or not a file mentions it; keys are checked by us."""
    text, key = str(override.input_line), str(override.key_or_group)
    if override.is_delete():
        return [text]
    if not _is_group(override, repository=repository):
        return ["++" + text.lstrip("+")]
    if override.value() is None:
        return [f"{key}=none"]
    return [f"~{key}"] if _is_bare_engine(override, repository=repository) else [text]


def _is_bare_engine(override: Override, *, repository: CachingConfigRepository) -> bool:
    """Whether it names an engine that has no file of choices: one that brings nothing but its entry point."""
    group = str(override.key_or_group)
    return (
        group == ENGINE_GROUP
        and not override.is_delete()
        and override.value() not in repository.get_group_options(group)
    )


def _load_file(
    default: ResultDefault, *, repository: CachingConfigRepository
) -> tuple[dict[str, Plain], Layer]:
    """What one file says, below the block that its place or its header names."""
    loaded = repository.load_config(default.config_path)
    if not isinstance(loaded.config, DictConfig):
        raise ConfigError(f"{default.config_path}.yaml is a list, but must be a mapping of keys.")
    tree = to_plain_tree(loaded.config)
    for part in reversed(default.package.split(".") if default.package else []):
        tree = {part: tree}
    return tree, Layer(
        origin=_origin(loaded.path, default.config_path), leaves=tuple(flatten(tree))
    )


def _origin(source: str, config_path: str) -> str:
    group, _, choice = config_path.rpartition("/")
    if not source.startswith("pkg://"):
        path = Path(source.removeprefix("file://")) / f"{config_path}"
        file = path.with_suffix(".yaml")
        return f"{RUN if _is_of_a_run(file) else FILE}{file}"
    return f"group {group}={choice}" if group else "default"


def _is_of_a_run(file: Path) -> bool:
    with file.open(encoding="utf-8") as lines:
        return lines.readline().startswith(DIGEST)


def _override_layers(
    parsed: Sequence[Override], *, repository: CachingConfigRepository
) -> list[Layer]:
    layers = []
    for override in parsed:
        if _is_group(override, repository=repository) and not _is_bare_engine(
            override, repository=repository
        ):
            continue
        key = override.key_or_group
        value = override.value()
        leaves = flatten({key: value}) if isinstance(value, dict) else {key: value}
        layers.append(
            Layer(origin=COMMAND_LINE, leaves=tuple(leaves), is_deletion=override.is_delete())
        )
    return layers


def _sentence(error: Exception, *, repository: CachingConfigRepository) -> str:
    """Hydra's complaint in our words, where it is one that users meet."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if not group:
            sentence = f"there is no file {choice}.yaml: look at --config-name and --config-dir."
            return f"{sentence} {OLD_CONFIG}" if choice in OLD_CONFIGS else sentence
        choices = ", ".join(repository.get_group_options(group))
        return f"there is no choice {choice} of the group {group}: " + (
            f"choose one of {choices}." if choices else "there is no such group."
        )
    text = _one_line(error)
    deleted = re.search(r"Could not delete from config. '(.+)' does not exist", text)
    if deleted is not None:
        return f"~{deleted[1]} takes back what a file or a group set, but none sets {deleted[1]}: remove it."
    return text


def _yaml_sentence(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        context = f" ({error.context})" if error.context else ""
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}. Mend the YAML there."
    return f"a configuration file is not YAML: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """An error and its cause as one paragraph that ends in a full stop."""
    parts = [" ".join(str(part).split()) for part in (error, error.__cause__)]
    text = ": ".join(part for part in dict.fromkeys(parts) if part not in ("", "None"))
    return text if text.endswith((".", "!", "?")) else f"{text}."
