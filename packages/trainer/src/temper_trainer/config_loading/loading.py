"""From the command line to a LoadedConfig: compose, check every key, lay the defaults underneath, structure, and note where values are
from."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_engine_api.errors import ConfigError
from temper_engine_api.registry import engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.loaded import LoadedConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.composition import PRIMARY, Composition, compose
from temper_trainer.config_loading.origins import origins_of
from temper_trainer.config_loading.schema import Plain, defaults_of, leaves_of, plain
from temper_trainer.config_loading.structuring import structure

WITHOUT_INFLUENCE = (
    "run.dir",
    "run.total_steps",
    "run.resume",
    "run.save_every",
    "run.max_ckpt_to_keep",
    "run.save_model",
    "run.eval_every",
    "run.eval_sampling",
    "run.eval_sampled",
    "run.num_table_rows",
    "run.table_every",
    "run.num_threads",
    "run.progress",
    "run.trackers",
    "runtime",
)
"""Blocks and keys that a training result does not depend on, so that a resumed run may change them."""


def load(overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = PRIMARY) -> LoadedConfig:
    """Compose and validate a configuration; imports neither torch nor an engine.

    Args:
        overrides: as on the command line: ``key=value``, ``group=choice``, ``+key=value``, ``~key``.
        config_dir: a folder with the user's own YAML; its files and groups come before ours of the same name.
        config_name: the file, without .yaml, that the composition begins with.

    Raises:
        ConfigError: an unknown, removed, conflicting or ineffective key, a value of the wrong type, a missing or malformed file.
    """
    composition = compose(overrides, config_dir=config_dir, config_name=config_name)
    engine_class = engine_config_class(str(composition.values.get("model_engine", "fsdp")))
    values = _with_defaults(composition, engine_class=engine_class)
    config = structure(values, TrainerConfig, engine_class=engine_class)
    resolved = plain(config)
    assert isinstance(resolved, dict)
    return LoadedConfig(
        config=config,
        resolved=resolved,
        origins=origins_of(leaves_of(resolved), layers=composition.layers),
        digest=digest_of(resolved),
    )


def digest_of(resolved: Mapping[str, Plain]) -> str:
    """SHA-256 of everything that is not WITHOUT_INFLUENCE, in an order that does not matter."""
    kept = {key: value for key, value in leaves_of(resolved).items() if not any(_is_within(key, name) for name in WITHOUT_INFLUENCE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _is_within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _with_defaults(composition: Composition, *, engine_class: type[EngineConfig]) -> dict[str, Plain]:
    defaults = defaults_of(TrainerConfig, engine_class=engine_class, given=composition.values)
    try:
        merged = OmegaConf.merge(defaults, composition.values)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {' '.join(str(error).split())}") from error
    assert isinstance(values, dict)
    return values
