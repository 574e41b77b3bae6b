"""The resolved configuration of a run: its values, their origins, and the files that record it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from temper_engine_api.checkpoint.transaction import write_durably
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.composition import DIGEST
from temper_trainer.config_loading.schema import Plain, to_plain
from temper_trainer.metrics.run_files import next_superseded_path


def scalar_text(value: object) -> str:
    """A value, list or mapping on one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(
        to_plain(value),
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()


def annotated_text(resolved: Mapping[str, Plain], *, origins: Mapping[str, str]) -> str:
    """A tree of values as YAML, with a comment at every value that is no default.

    Args:
        resolved: nested values.
        origins: by dotted key.
    """
    return "\n".join(_lines(resolved, prefix="", origins=origins)) + "\n"


def _lines(tree: Mapping[str, Plain], *, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{scalar_text(name)}:"
            yield from _lines(value, prefix=f"{key}.", origins=origins)
        else:
            line = f"{indent}{scalar_text(name)}: {scalar_text(value)}"
            yield line if origins[key] == "default" else f"{line}  # {origins[key]}"


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
    _write(directory / "config.yaml", format_config(loaded))
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


def format_config(loaded: LoadedConfig) -> str:
    """The text of ``config.yaml``."""
    return f"{DIGEST}{loaded.digest}\ndefaults: [temper, _self_]\n{annotated_text(loaded.resolved, origins=loaded.origins)}"
