"""Load a LoadedConfig: compose files, check keys, add defaults, build and check dataclasses."""

import copy
import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_engine_api.errors import ConfigError, EngineNotFoundError, format_install
from temper_engine_api.registry import load_engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import (
    INFERENCE_TASKS,
    LEGACY_TRAINING_WORKER,
    LEGACY_WORKER_GROUP,
    ROLES,
    RunConfig,
)
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.composition import (
    COMMAND_LINE,
    DEFAULT_CONFIG_NAME,
    FILE_PREFIX,
    Composition,
    Layer,
    check_mappings,
    compose,
    to_plain_tree,
)
from temper_trainer.config_loading.ineffective_keys import check_ineffective_keys
from temper_trainer.config_loading.resolved_config import LoadedConfig
from temper_trainer.config_loading.schema import (
    Plain,
    collect_defaults,
    collect_keys,
    flatten,
    to_plain,
)
from temper_trainer.config_loading.secrets import (
    check_secrets,
    find_secret_values,
    restore_secret_references,
)
from temper_trainer.config_loading.structuring import structure
from temper_trainer.config_loading.unknown_keys import check_keys
from temper_trainer.redaction import register_secrets
from temper_trainer.settings.names import is_within, list_blocks

DIGEST_EXCLUDED_KEYS = (
    # The other settings of the run say how long it is, and what it writes and measures.
    *(f"run.{field.name}" for field in fields(RunConfig) if field.name != "seed"),
    "runtime",
    *(f"{role}.{key}" for role in ROLES for key in ("num_workers", "pool")),
    "rollout.max_concurrent",
    "rollout.num_replicas",
    "rollout.pool",
    "rollout.vllm",
    "weight_sync",
    "reward.num_workers",
    "reward.num_threads",
    "reward.model.num_workers",
    "reward.model.pool",
)
"""Keys and blocks that do not influence a training result (up to rounding); a resumed run may
change them.
"""


def load(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = DEFAULT_CONFIG_NAME,
) -> LoadedConfig:
    """Compose and validate a configuration; imports neither torch nor an engine.

    Secrets of the configuration are registered, so that `redact_secrets` hides them even if the
    configuration is refused.

    Args:
        overrides: As on the command line: ``key=value``, ``group=choice``, ``+key=value``,
            ``~key``.
        config_dir: Folder with the user's YAML; its files and groups override built-in ones of the
            same name.
        config_name: File, without .yaml, that the composition starts with.

    Raises:
        ConfigError: If a key is unknown, removed, conflicting or ineffective, a value has the wrong
            type, or a file is missing or malformed.
    """
    composition = compose(overrides, config_dir=config_dir, config_name=config_name)
    # Find the engine's class first: it defines which keys exist below `actor.engine` and the like.
    engine_class = _engine_config(composition.values.get("model_engine"))
    known = collect_keys(TrainerConfig, engine_class=engine_class)
    check_keys(composition.layers, known=known, values=composition.values)
    # Check secrets before interpolations are resolved: afterwards a secret and a reference to one
    # look the same.
    check_secrets(composition.values)
    _check_optional_roles(composition)
    values = expand_home(_with_defaults(composition, engine_class=engine_class))
    assert isinstance(values, dict)
    # Register secrets before values are checked, because messages show values.
    shown = restore_secret_references(values, composed=composition.values)
    register_secrets(find_secret_values(values, written=shown))
    data = values["data"]
    if values["task"] not in INFERENCE_TASKS and isinstance(data, dict) and not data["train"]:
        data["train"] = {}  # so that its missing path is reported with other problems
    values["use_legacy_worker_impl"] = normalize_worker_switch(values["use_legacy_worker_impl"])
    config = structure(values, TrainerConfig, engine_class=engine_class)
    resolved = to_plain(config)
    assert isinstance(resolved, dict)
    origins = find_origins(flatten(resolved), layers=composition.layers)
    check_ineffective_keys(
        config, set_by_user=_set_by_user(origins, resolved=resolved, engine_class=engine_class)
    )
    check_worker_switch(config)
    return LoadedConfig(
        config=config,
        resolved=restore_secret_references(resolved, composed=composition.values),
        origins=origins,
        digest=compute_digest(resolved),
    )


def compute_digest(resolved: Mapping[str, Plain]) -> str:
    """Return the SHA-256 of all values except DIGEST_EXCLUDED_KEYS. Their order does not matter."""
    # Include only keys that influence numbers: a resumed run may change where and how fast it runs.
    included = {
        key: value
        for key, value in flatten(resolved).items()
        if not is_within(key, *DIGEST_EXCLUDED_KEYS)
    }
    return hashlib.sha256(json.dumps(included, sort_keys=True).encode()).hexdigest()


def _engine_config(name: Plain) -> type[EngineConfig]:
    if name is None:
        raise ConfigError(
            "model_engine is not set: start your file with defaults: [temper, _self_], which sets "
            "it."
        )
    try:
        return _load_engine_config_class(str(name), tuple(sys.path))
    except EngineNotFoundError as error:
        raise ConfigError(f"model_engine is {name}, but {error}") from error


@functools.cache
def _load_engine_config_class(name: str, search_path: tuple[str, ...]) -> type[EngineConfig]:
    """Load the class once per search path, because it reads the metadata of all packages."""
    return load_engine_config_class(name)


def _check_optional_roles(composition: Composition) -> None:
    """Refuse an override that creates a role without a model; name the group to use instead."""
    for role, choice in {
        "critic": "critic=value_model (or algorithm=ppo)",
        "ref": "ref=frozen",
    }.items():
        block = composition.values.get(role)
        if isinstance(block, dict) and not any(
            key.startswith("engine.model.") for key in flatten(block)
        ):
            keys = ", ".join(flatten(block, prefix=f"{role}."))
            raise ConfigError(f"{keys} has no effect without a {role}: add {choice}, or remove it.")


def _set_by_user(
    origins: Mapping[str, str], *, resolved: dict[str, Plain], engine_class: type[EngineConfig]
) -> dict[str, str]:
    """Return the origins of the keys that the user set to other values than the defaults.

    A default that is repeated in a file does not count, because a run's ``config.yaml`` has all
    values. A value of null does not count either: it removes a group's setting.
    """
    defaults = flatten(collect_defaults(TrainerConfig, engine_class=engine_class, given=resolved))
    values = flatten(resolved)
    return {
        key: origin
        for key, origin in origins.items()
        # On the command line a default counts, too, because the user has typed it.
        if (origin == COMMAND_LINE and (values[key] is not None or defaults.get(key) is not None))
        or (is_set_by_user(origin) and (key not in defaults or values[key] != defaults[key]))
    }


def _with_defaults(
    composition: Composition, *, engine_class: type[EngineConfig]
) -> dict[str, Plain]:
    defaults = collect_defaults(TrainerConfig, engine_class=engine_class, given=composition.values)
    check_mappings(composition.values, defaults=defaults)
    # Merge with the defaults, so that an interpolation may refer to a key that is not set.
    merged = _merge(defaults, composition.values)
    merged = {key: _resolve_references(value, root=merged) for key, value in merged.items()}
    # OmegaConf makes an object of each value, which takes 40 % of `load`.
    if not any(map(_is_resolved_by_omegaconf, flatten(merged).values())):
        return merged
    try:
        return to_plain_tree(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _resolve_references(value: Plain, *, root: Mapping[str, Plain]) -> Plain:
    """Replace each ``${KEY}`` that is a whole value by the value of the key.

    Left to OmegaConf: a key that does not exist, and a value that has an interpolation itself.
    """
    if isinstance(value, dict):
        return {key: _resolve_references(item, root=root) for key, item in value.items()}
    reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if reference is None:
        return value
    target: Plain = dict(root)
    for part in reference[1].split("."):
        if not isinstance(target, dict) or part not in target:
            return value
        target = target[part]
    return value if _is_resolved_by_omegaconf(target) else copy.deepcopy(target)


def _merge(defaults: dict[str, Plain], values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the defaults with values in their place; mappings are merged key by key."""
    merged = dict(defaults)
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(default, dict) and isinstance(value, dict):
            value = _merge(default, value)
        merged[key] = value
    return merged


def _is_resolved_by_omegaconf(value: Plain) -> bool:
    """Return True if a value has an interpolation, or is ``???``, which OmegaConf refuses."""
    if isinstance(value, list):
        return any(map(_is_resolved_by_omegaconf, value))
    if isinstance(value, dict):
        return any(map(_is_resolved_by_omegaconf, value.values()))
    return isinstance(value, str) and ("${" in value or value == "???")


DEFAULT = "default"
"""Origin of a value that was not set."""


def find_origins(leaves: Mapping[str, object], *, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the origin per dotted key: the last layer that sets it.

    A layer that sets a block to one value (an interpolation, an empty mapping, null) is the origin
    of all keys below it.

    Args:
        leaves: The resolved values by dotted key.
        layers: In order; later ones win.
    """
    # Sets, because to compare each of 300 keys with each key of all layers takes a tenth of `load`.
    set_keys = [frozenset(layer.leaves) for layer in layers]
    blocks = [{block for key in keys for block in list_blocks(key)} for keys in set_keys]
    origins = {}
    for key in leaves:
        own_blocks = list_blocks(key)
        origin = DEFAULT
        for layer, keys, layer_blocks in zip(layers, set_keys, blocks, strict=True):
            # No break: a later layer replaces an earlier one.
            if key in layer_blocks or not keys.isdisjoint(own_blocks):
                origin = DEFAULT if layer.is_deletion else layer.origin
        origins[key] = origin
    return origins


def is_set_by_user(origin: str) -> bool:
    """Return True if an origin is the command line or a user's file."""
    # The config.yaml of an earlier run contains every value, so it does not count.
    return origin == COMMAND_LINE or origin.startswith(FILE_PREFIX)


PATH_KEYS = frozenset({"dir", "file", "path", "paths", "resume", "rollout_python", "tools_path"})
"""Last components of keys whose values are paths."""


def expand_home(value: Plain, *, key: str = "") -> Plain:
    """Expand ``~`` in all paths; shells do not expand it after ``key=``.

    Args:
        value: A tree of the configuration, or a value in it.
        key: Last component of the value's key.
    """
    if isinstance(value, dict):
        return {name: expand_home(item, key=name) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item, key=key) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and key in PATH_KEYS else value


logger = logging.getLogger(__name__)


def normalize_worker_switch(value: Plain) -> Plain:
    """Map a boolean of use_legacy_worker_impl to its word; leave the rest to the type check."""
    words: dict[Plain, Plain] = {True: "enable", False: "disable"}
    return words[value] if isinstance(value, bool) else value


def check_worker_switch(config: TrainerConfig) -> None:
    """Warn about ``auto``; reject ``enable`` if the deprecated workers cannot do the task.

    Raises:
        ConfigError: If ``enable`` is set without temper-legacy-shim, with another engine than fsdp,
            or in task sft.
    """
    if config.use_legacy_worker_impl == "auto":
        logger.warning(
            "use_legacy_worker_impl=auto is the same as disable and will be rejected from 0.3 on: "
            "remove it."
        )
    if config.use_legacy_worker_impl != "enable":
        return
    if LEGACY_TRAINING_WORKER not in {
        point.name for point in entry_points(group=LEGACY_WORKER_GROUP)
    }:
        raise ConfigError(
            "use_legacy_worker_impl is enable, but no installed package provides the deprecated "
            f"workers (entry points {LEGACY_WORKER_GROUP!r}): run "
            f"{format_install('temper-legacy-shim[workers]')}, or set "
            "use_legacy_worker_impl=disable to run on engines."
        )
    if config.task == "sft":
        raise ConfigError(
            "use_legacy_worker_impl is enable in task sft, which the deprecated workers do not "
            "support: set it to disable."
        )
    if config.model_engine != "fsdp":
        raise ConfigError(
            f"use_legacy_worker_impl is enable and model_engine is {config.model_engine}, but "
            "temper-train runs the deprecated workers only on fsdp: choose model_engine=fsdp, or "
            "set use_legacy_worker_impl=disable. The deprecated classes of other engines are for "
            "your own code."
        )
