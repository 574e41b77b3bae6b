"""A configuration as it was loaded: the frozen settings, the same as plain values, and where each value came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from temper_engine_api.checkpoint.transaction import write_durably
from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.composition import DIGEST
from temper_trainer.config_loading.schema import Plain
from temper_trainer.config_loading.yaml_text import annotated_text
from temper_trainer.metrics.run_files import next_superseded_path


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
    """Write a file that is whole at any time; another content that lies there is renamed.

    Raises:
        OSError: If the disk is full; the error names the file, and the earlier file is untouched.
    """
    if path.is_file() and path.read_bytes() == text.encode():
        return
    new = path.with_name(f"{path.name}.new")
    try:
        write_durably(new, text)
    except OSError as error:  # that of a write names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    if path.exists():
        path.rename(next_superseded_path(path))
    new.replace(path)


def printed(loaded: LoadedConfig) -> str:
    """The text of ``config.yaml``."""
    return f"{DIGEST}{loaded.digest}\ndefaults: [temper, _self_]\n{annotated_text(loaded.resolved, origins=loaded.origins)}"
