"""Compose groups, YAML files and command-line overrides with Hydra into one mapping.

Only chosen values pass through here; the defaults of the dataclasses are added afterwards. Hydra's
loader is used without its global state, so that loading a configuration leaves no trace in the
process.
"""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_engine_api.errors import ConfigError
from temper_trainer.config.removed_keys import describe_old_config
from temper_trainer.config_loading.schema import Entry, Plain, flatten, to_plain
from temper_trainer.config_loading.secrets import redact_override
from temper_trainer.config_loading.variant_choice import (
    collect_choices,
    drop_former_variants,
    expand_names,
    find_names,
    is_choice,
)
from temper_trainer.settings.names import is_within

BUILTIN_CONFIGS = "pkg://temper_trainer.conf"
"""Package with the trainer's config groups."""
ENGINE_GROUP = "model_engine"
"""Group whose choices need no file: any installed engine is a choice."""
DEFAULT_CONFIG_NAME = "temper"
"""File that a composition starts with, unless the user names another."""
COMMAND_LINE = "command line"
"""Origin of an override."""
FILE_PREFIX = "file "
"""Prefix of a value's origin if a user's file sets it; the path follows."""
RUN_PREFIX = "run "
"""Prefix of a value's origin if an earlier run's ``config.yaml`` sets it; the path follows."""
DIGEST_PREFIX = "# digest "
"""First line prefix in files that a run writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The keys that one file, group choice or override sets."""

    origin: str
    """``group NAME=CHOICE``, ``file PATH`` or ``command line``."""
    leaves: tuple[str, ...]
    """Dotted keys that it sets, in order."""
    is_deletion: bool = False
    """True if it resets its keys to their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """All chosen values and the layers that set them."""

    values: dict[str, Plain]
    """Nested values with unresolved interpolations."""
    layers: tuple[Layer, ...]
    """Layers by precedence, lowest first. Without the settings of variants that a later
    layer replaces.
    """


def compose(overrides: Sequence[str], *, config_dir: str | None, config_name: str) -> Composition:
    """Compose groups, files and overrides; checks only Hydra's grammar, not the keys.

    Raises:
        ConfigError: If an override cannot be parsed, a choice does not exist, or a file is missing
            or malformed.
    """
    # If no version is given, Hydra warns and uses the defaults of release 1.1.
    version.setbase("1.3")
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(
            f"--config-dir {config_dir} is not a directory: give the folder with your YAML files."
        )
    repository = _repository(config_dir)
    choices = collect_choices()
    for text in overrides:
        _check_has_value(text, repository=repository)
    parsed = [_name_variant(_parse(text), choices=choices) for text in overrides]
    rewritten = [_rewrite_override(override, repository=repository) for override in parsed]
    try:
        # prepend_hydra=False leaves out Hydra's own settings (run folders, logging, launchers),
        # which nothing here reads.
        chosen = create_defaults_list(
            repository, config_name, rewritten, prepend_hydra=False, skip_missing=False
        )
        files = [
            _load_file(default, repository=repository, choices=choices)
            for default in chosen.defaults
        ]
        set_by_overrides = [each for each in parsed if _sets_key(each, repository=repository)]
        # The names on the command line count before its other keys, so their order does not matter.
        names = _find_override_names(set_by_overrides, choices=choices)
        file_layers = _drop_former_variants(files, last_names=names, choices=choices)
        trees = [*(tree for tree, _ in files), *_list_override_trees(set_by_overrides)]
        for earlier, later in combinations(trees, 2):
            check_mappings(later, defaults=earlier)
        composed = OmegaConf.merge({}, *(tree for tree, _ in files))
        ConfigLoaderImpl._apply_overrides_to_config(chosen.config_overrides, composed)
    except yaml.YAMLError as error:
        raise ConfigError(_describe_yaml_error(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_translate_hydra_error(error, repository=repository)) from error
    assert isinstance(composed, DictConfig)
    values = to_plain_tree(composed)
    for override in parsed:
        if _is_bare_engine(override, repository=repository):
            values[ENGINE_GROUP] = str(override.value())
    expand_names(values, choices=choices)
    layers = (*file_layers, *map(_make_override_layer, set_by_overrides))
    return Composition(values=values, layers=layers)


def list_group_choices(
    groups: Sequence[str], *, config_dir: str | None = None
) -> dict[str, list[str]]:
    """Return the choices of each config group, the user's own included."""
    repository = _repository(config_dir)
    return {group: list(repository.get_group_options(group)) for group in groups}


def check_mappings(
    values: Mapping[str, Plain], *, defaults: Mapping[str, Plain], prefix: str = ""
) -> None:
    """Refuse a list in place of a mapping, for which OmegaConf's error is hard to understand.

    Raises:
        ConfigError: If a value is a list whose default is a mapping.
    """
    for key, value in values.items():
        default = defaults.get(key)
        if not isinstance(default, dict):
            continue
        if isinstance(value, list):
            raise ConfigError(f"{prefix}{key} is a list, but must be a mapping of keys.")
        if isinstance(value, dict):
            check_mappings(value, defaults=default, prefix=f"{prefix}{key}.")


def to_plain_tree(config: DictConfig, *, resolve: bool = False) -> dict[str, Plain]:
    """Convert a composed mapping to plain values."""
    tree = to_plain(OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve))
    assert isinstance(tree, dict)
    return tree


def _repository(config_dir: str | None) -> CachingConfigRepository:
    """Return the config files to search: the user's folder first, so that it overrides ours."""
    if config_dir is None:
        return _builtin_repository()
    path = create_config_search_path(BUILTIN_CONFIGS)
    path.prepend("user", f"file://{Path(config_dir).resolve()}", "main")
    return CachingConfigRepository(ConfigRepository(path))


@functools.cache
def _builtin_repository() -> CachingConfigRepository:
    """Return the trainer's config files, which a process reads once."""
    return CachingConfigRepository(ConfigRepository(create_config_search_path(BUILTIN_CONFIGS)))


def _check_has_value(text: str, *, repository: CachingConfigRepository) -> None:
    if not re.fullmatch(r"[\w.-]+", text):
        return
    shown = redact_override(text)
    is_experiment = text in repository.get_group_options("experiment")
    setting = f"experiment={text}" if is_experiment else f"{shown}=VALUE"
    raise ConfigError(
        f"{shown!r} on the command line has no value: write {setting}, or use --help for a list of "
        "the settings."
    )


@functools.cache
def _make_parser() -> OverridesParser:
    """Return Hydra's parser. It keeps no state, and to build it takes as long as an override."""
    return OverridesParser.create()


def _parse(text: str) -> Override:
    try:
        override = _make_parser().parse_override(text)
    except HydraException as error:
        shown = redact_override(text)
        # The parser's message repeats parts from the text; so would a chained traceback.
        quoted = _quote_values(text) if shown == text else None
        cause = f" {_one_line(error)}" if shown == text else ""
        advice = (
            f" write {quoted}."
            if quoted is not None
            else f"{cause} Write KEY=VALUE, ~KEY to reset a key to its default, or GROUP=CHOICE; "
            "quote strings with special characters, 'key=\"a, b\"'."
        )
        raise ConfigError(f"cannot parse {shown!r} on the command line:{advice}") from (
            error if shown == text else None
        )
    if override.is_sweep_override():
        raise ConfigError(
            f"{redact_override(text)} gives several values for one run: write a list as [a,b], a "
            "string with a comma as 'key=\"a,b\"'."
        )
    return override


def _quote_values(text: str) -> str | None:
    """Return an override with its texts in quotes, for a shell; None if that is no override.

    Mappings and nested lists are left to the user, because quotes would turn them into texts.
    """
    key, _, value = text.partition("=")
    is_list = value.startswith("[") and value.endswith("]")
    texts = [each.strip() for each in value[1:-1].split(",")] if is_list else [value]
    is_nested = any(each.startswith(("{", "[")) for each in texts)
    # With several texts, a brace may belong to a mapping that was split at a comma.
    is_split = len(texts) > 1 and "{" in value
    if is_nested or is_split or any(each in value for each in ('"', "'", "${")):
        return None
    joined = ",".join(f'"{each.strip()}"' for each in texts)
    quoted = f"{key}=[{joined}]" if is_list else f"{key}={joined}"
    try:
        _make_parser().parse_override(quoted)
    except HydraException:
        return None
    return f"'{quoted}'"


def _is_group(override: Override, *, repository: CachingConfigRepository) -> bool:
    return bool(repository.group_exists(override.key_or_group))


def _rewrite_override(override: Override, *, repository: CachingConfigRepository) -> Override:
    """Rewrite an override for Hydra so that any key may be set, even if no file has it.

    Keys are checked later, with better messages.
    """
    text, key = str(override.input_line), str(override.key_or_group)
    if override.is_delete():
        return override
    if not _is_group(override, repository=repository):
        # Hydra's ++ sets a key whether or not it exists.
        return replace(override, type=OverrideType.FORCE_ADD, input_line="++" + text.lstrip("+"))
    if override.value() is None:
        return _parse(f"{key}=none")
    return _parse(f"~{key}") if _is_bare_engine(override, repository=repository) else override


def _is_bare_engine(override: Override, *, repository: CachingConfigRepository) -> bool:
    """Return True if an override chooses an engine with an entry point but no config file."""
    group = str(override.key_or_group)
    return (
        group == ENGINE_GROUP
        and not override.is_delete()
        and override.value() not in repository.get_group_options(group)
    )


def _load_file(
    default: ResultDefault,
    *,
    repository: CachingConfigRepository,
    choices: Mapping[str, Entry],
) -> tuple[dict[str, Plain], Layer]:
    """Load a file and return its values below the block named by its location or header."""
    loaded = repository.load_config(default.config_path)
    if not isinstance(loaded.config, DictConfig):
        raise ConfigError(f"{default.config_path}.yaml is a list, but must be a mapping of keys.")
    tree = to_plain_tree(loaded.config)
    tree = _nest(default.package, tree) if default.package else tree
    expand_names(tree, choices=choices)
    return tree, Layer(
        origin=_origin(loaded.path, default.config_path), leaves=tuple(flatten(tree))
    )


def _origin(source: str, config_path: str) -> str:
    group, _, choice = config_path.rpartition("/")
    if not source.startswith("pkg://"):
        path = Path(source.removeprefix("file://")) / f"{config_path}"
        file = path.with_suffix(".yaml")
        return f"{RUN_PREFIX if _is_written_by_run(file) else FILE_PREFIX}{file}"
    return f"group {group}={choice}" if group else "default"


def _is_written_by_run(file: Path) -> bool:
    with file.open(encoding="utf-8") as lines:
        return lines.readline().startswith(DIGEST_PREFIX)


def _sets_key(override: Override, *, repository: CachingConfigRepository) -> bool:
    """Return True unless an override chooses a group's file."""
    return not _is_group(override, repository=repository) or _is_bare_engine(
        override, repository=repository
    )


def _make_override_layer(override: Override) -> Layer:
    key, value = override.key_or_group, override.value()
    leaves = flatten({key: value}) if isinstance(value, dict) else {key: value}
    return Layer(origin=COMMAND_LINE, leaves=tuple(leaves), is_deletion=override.is_delete())


def _name_variant(override: Override, *, choices: Mapping[str, Entry]) -> Override:
    """Rewrite KEY=NAME of a variant to KEY.name=NAME, which keeps the variant's other settings."""
    value = None if override.is_delete() else override.value()
    if not (isinstance(value, str) and is_choice(override.key_or_group, choices=choices)):
        return override
    key, _, text = str(override.input_line).partition("=")
    return override if value.startswith("${") else _parse(f"{key}.name={text}")


def _find_override_names(
    overrides: Sequence[Override], *, choices: Mapping[str, Entry]
) -> dict[str, Plain]:
    """Return the variant names that overrides give, by the block's dotted key."""
    # Hydra refuses to delete a block that is dropped already.
    deleted = {str(override.key_or_group) for override in overrides if override.is_delete()}
    names: dict[str, Plain] = {}
    for tree in _list_override_trees(overrides):
        names |= find_names(tree, choices=choices)
    return {key: name for key, name in names.items() if key not in deleted}


def _list_override_trees(overrides: Sequence[Override]) -> list[dict[str, Plain]]:
    """Return the values that overrides set, each below its key."""
    return [
        _nest(override.key_or_group, to_plain(override.value()))
        for override in overrides
        if not override.is_delete()
    ]


def _nest(key: str, value: Plain) -> dict[str, Plain]:
    """Return a tree with one value at a dotted key."""
    first, _, rest = key.partition(".")
    return {first: _nest(rest, value) if rest else value}


def _drop_former_variants(
    files: Sequence[tuple[dict[str, Plain], Layer]],
    *,
    last_names: Mapping[str, Plain],
    choices: Mapping[str, Entry],
) -> list[Layer]:
    """Drop the settings of variants that a later file or an override replaces.

    Args:
        files: Values per file, which are changed, and its layer.
        last_names: Names that the overrides give, which come after all files.
        choices: See ``collect_choices``.

    Returns:
        The layers without the dropped keys.
    """
    names = [*(find_names(tree, choices=choices) for tree, _ in files), last_names]
    layers: list[Layer] = []
    for position, given in enumerate(names):
        earlier = [tree for tree, _ in files[:position]]
        dropped = drop_former_variants(earlier, names=given, choices=choices)
        layers = [
            replace(
                layer,
                leaves=tuple(leaf for leaf in layer.leaves if not is_within(leaf, *dropped)),
            )
            for layer in layers
        ]
        layers += [layer for _, layer in files[position : position + 1]]
    return layers


def _translate_hydra_error(error: Exception, *, repository: CachingConfigRepository) -> str:
    """Return a clear message for the Hydra errors that users encounter."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if not group:
            return (
                f"there is no file {choice}.yaml: check --config-name and --config-dir."
                f"{describe_old_config(choice)}"
            )
        choices = repository.get_group_options(group)
        near = difflib.get_close_matches(choice.lower(), choices, n=1)
        advice = f"did you mean {near[0]}? If not, choose one of" if near else "choose one of"
        return f"there is no choice {choice or repr('')} of the group {group}: " + (
            f"{advice} {', '.join(choices)}." if choices else "there is no such group."
        )
    text = _one_line(error)
    deleted = re.search(r"Could not delete from config. '(.+)' does not exist", text)
    if deleted is not None:
        return (
            f"~{deleted[1]} resets a key that a file or group has set, but no file or group sets "
            f"{deleted[1]}: remove ~{deleted[1]}."
        )
    return text


def _describe_yaml_error(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        context = f" ({error.context})" if error.context else ""
        return (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: "
            f"{error.problem}{context}. Correct the YAML there."
        )
    return f"a configuration file is not YAML: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """Join an error and its cause into one paragraph that ends with a period."""
    parts = [" ".join(str(part).split()) for part in (error, error.__cause__)]
    text = ": ".join(part for part in dict.fromkeys(parts) if part not in ("", "None"))
    return text if text.endswith((".", "!", "?")) else f"{text}."
