"""From the command line to a LoadedConfig: compose, check every key, lay defaults underneath, structure, note where values came from."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_engine_api.errors import ConfigError, EngineNotFoundError
from temper_engine_api.registry import engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.composition import (
    COMMAND_LINE,
    PRIMARY,
    Composition,
    compose,
    tree_of,
)
from temper_trainer.config_loading.deprecated_workers import check_worker_switch, read_switch
from temper_trainer.config_loading.home import with_home
from temper_trainer.config_loading.ineffective import check_effects
from temper_trainer.config_loading.loaded import LoadedConfig
from temper_trainer.config_loading.origins import is_users, origins_of
from temper_trainer.config_loading.schema import Plain, defaults_of, keys_of, leaves_of, plain
from temper_trainer.config_loading.secrets import check_secrets, without_secrets
from temper_trainer.config_loading.structuring import structure
from temper_trainer.config_loading.unknown_keys import check_keys

WITHOUT_INFLUENCE = (
    "run.dir",
    "run.total_steps",
    "run.total_epochs",
    "run.resume",
    "run.save_every",
    "run.save_interval_s",
    "run.stop_grace_s",
    "run.save_in_background",
    "run.max_ckpt_to_keep",
    "run.keep_every",
    "run.verify_checkpoints",
    "run.save_model",
    "run.eval_every",
    "run.eval_sampling",
    "run.eval_sampled",
    "run.num_table_rows",
    "run.table_every",
    "run.num_threads",
    "run.progress",
    "run.trackers",
    "run.prometheus_port",
    "run.prometheus_address",
    "runtime",
    *(f"{role}.{key}" for role in ("actor", "critic", "ref") for key in ("num_workers", "pool")),
    "rollout.max_concurrent",
    "rollout.num_replicas",
    "rollout.pool",
    "rollout.vllm",
    "weight_sync",
    "reward.num_workers",
    "reward.model.num_workers",
    "reward.model.pool",
)
"""Blocks and keys that a training result does not depend on (up to rounding), so that a resumed run may change them."""


def load(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = PRIMARY
) -> LoadedConfig:
    """Compose and validate a configuration; imports neither torch nor an engine.

    Args:
        overrides: as on the command line: ``key=value``, ``group=choice``, ``+key=value``, ``~key``.
        config_dir: a folder with the user's own YAML; its files and groups come before ours of the same name.
        config_name: the file, without .yaml, that the composition begins with.

    Raises:
        ConfigError: an unknown, removed, conflicting or ineffective key, a value of the wrong type, a missing or malformed file.
    """
    composition = compose(overrides, config_dir=config_dir, config_name=config_name)
    engine_class = _engine_config(composition.values.get("model_engine"))
    check_keys(composition.layers, known=keys_of(TrainerConfig, engine_class=engine_class))
    check_secrets(composition.values)
    _check_optional_roles(composition)
    values = with_home(_with_defaults(composition, engine_class=engine_class))
    assert isinstance(values, dict)
    values["use_legacy_worker_impl"] = read_switch(values["use_legacy_worker_impl"])
    config = structure(values, TrainerConfig, engine_class=engine_class)
    resolved = plain(config)
    assert isinstance(resolved, dict)
    origins = origins_of(leaves_of(resolved), layers=composition.layers)
    check_effects(
        config, set_by_user=_set_by_user(origins, resolved=resolved, engine_class=engine_class)
    )
    check_worker_switch(config)
    written = without_secrets(resolved, composed=composition.values)
    return LoadedConfig(
        config=config, resolved=written, origins=origins, digest=digest_of(resolved)
    )


def digest_of(resolved: Mapping[str, Plain]) -> str:
    """SHA-256 of everything that is not WITHOUT_INFLUENCE, in an order that does not matter."""
    kept = {
        key: value
        for key, value in leaves_of(resolved).items()
        if not any(_is_within(key, name) for name in WITHOUT_INFLUENCE)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _engine_config(name: Plain) -> type[EngineConfig]:
    if name is None:
        raise ConfigError(
            "model_engine is not set: a file of yours begins with defaults: [temper, _self_], which sets it."
        )
    try:
        return engine_config_class(str(name))
    except EngineNotFoundError as error:
        raise ConfigError(f"model_engine is {name}, but {error}") from error


def _check_optional_roles(composition: Composition) -> None:
    """A role that a lone override brought to life has no model: say which group does it."""
    for role, choice in {
        "critic": "critic=value_model (or algorithm=ppo)",
        "ref": "ref=frozen",
    }.items():
        block = composition.values.get(role)
        if isinstance(block, dict) and not any(
            key.startswith("engine.model.") for key in leaves_of(block)
        ):
            keys = ", ".join(leaves_of(block, prefix=f"{role}."))
            raise ConfigError(f"{keys} has no effect without a {role}: add {choice}, or remove it.")


def _set_by_user(
    origins: Mapping[str, str], *, resolved: dict[str, Plain], engine_class: type[EngineConfig]
) -> dict[str, str]:
    """Origins of what the user wrote; a default repeated in a file is none, since ``config.yaml`` of a run holds every value."""
    defaults = leaves_of(defaults_of(TrainerConfig, engine_class=engine_class, given=resolved))
    values = leaves_of(resolved)
    return {
        key: origin
        for key, origin in origins.items()
        if origin == COMMAND_LINE
        or (is_users(origin) and (key not in defaults or values[key] != defaults[key]))
    }


def _is_within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _with_defaults(
    composition: Composition, *, engine_class: type[EngineConfig]
) -> dict[str, Plain]:
    defaults = defaults_of(TrainerConfig, engine_class=engine_class, given=composition.values)
    try:
        merged = OmegaConf.merge(defaults, composition.values)
        assert isinstance(merged, DictConfig)
        return tree_of(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
