"""A configuration as it was loaded: the frozen settings, the same as plain values, and where each value came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from temper_trainer.config.run import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """What ``config_loading.load`` returns, and what a loop starts from."""

    config: TrainerConfig
    """The settings."""
    resolved: Mapping[str, object]
    """The same, nested, of nothing but dicts, lists, texts, numbers, booleans and None."""
    origins: Mapping[str, str]
    """For every dotted key: ``default``, ``group model_engine=fsdp``, ``file PATH`` or ``command line``."""
    digest: str
    """SHA-256, hexadecimal, of the values that a training result depends on; where it runs and what it shows is left out."""


def write_resolved(loaded: LoadedConfig, directory: Path) -> None:
    """Write ``config.yaml`` (every value) and ``config_origins.yaml`` (where each came from) into a folder.

    ``config.yaml`` is itself a configuration: copied beside others and named with --config-name, it repeats the run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = {"defaults": ["temper", "_self_"], **loaded.resolved}
    (directory / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    origins = yaml.safe_dump(dict(loaded.origins), sort_keys=False, allow_unicode=True, width=1000)
    (directory / "config_origins.yaml").write_text(f"# digest {loaded.digest}\n{origins}", encoding="utf-8")
