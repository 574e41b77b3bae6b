"""A configuration as it was loaded: the frozen settings, the same as plain values, and where each value came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.composition import DIGEST
from temper_trainer.config_loading.schema import Plain
from temper_trainer.config_loading.yaml_text import annotated_text
from temper_trainer.metrics.records import superseded_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """What ``load`` returns, and what a run starts from."""

    config: TrainerConfig
    """The settings."""
    resolved: Mapping[str, Plain]
    """The same, nested, of nothing but dicts, lists, texts, numbers, booleans and None. A secret is the
    `${oc.env:NAME}` that it was given by."""
    origins: Mapping[str, str]
    """For every dotted key: ``default``, ``group model_engine=fsdp``, ``file PATH`` or ``command line``."""
    digest: str
    """SHA-256, hexadecimal, of the values that a training result depends on; where it runs and what it shows is left out."""


def write_resolved(loaded: LoadedConfig, directory: Path) -> None:
    """Write ``config.yaml`` (every value, with the origin of what is no default as a comment) and ``config_origins.yaml`` (all origins).

    ``config.yaml`` is itself a configuration: ``temper-train --config-dir FOLDER --config-name config`` repeats the run. Where a run is
    resumed with other settings, the earlier files stay as ``*.superseded-N.yaml``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    origins = yaml.safe_dump(dict(loaded.origins), sort_keys=False, allow_unicode=True, width=1000)
    _write(directory / "config.yaml", printed(loaded))
    _write(directory / "config_origins.yaml", f"{DIGEST}{loaded.digest}\n{origins}")


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(superseded_name(path))
    path.write_text(text, encoding="utf-8")


def printed(loaded: LoadedConfig) -> str:
    """The text of ``config.yaml``."""
    return f"{DIGEST}{loaded.digest}\ndefaults: [temper, _self_]\n{annotated_text(loaded.resolved, origins=loaded.origins)}"
