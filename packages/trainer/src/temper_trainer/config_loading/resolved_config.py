"""A run's resolved configuration: values, origins, and the files that record them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from temper_engine_api.checkpoint.transaction import write_durably
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.composition import DIGEST_PREFIX
from temper_trainer.config_loading.schema import Plain, to_plain
from temper_trainer.metrics.run_files import choose_superseded_path

MAX_LINE_LENGTH = 2**31 - 1
"""The greatest width of libyaml, so that no value is divided into several lines."""


class _Dumper(yaml.CSafeDumper):
    """Puts texts in quotes that OmegaConf would read as numbers, such as 1e3.

    PyYAML's own emitter takes three times as long, and loses line breaks of Unicode.
    """


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


def format_value(value: object) -> str:
    """Format a value, list or mapping on one line of YAML."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.dump(
        to_plain(value),
        Dumper=_Dumper,
        default_flow_style=True,
        width=MAX_LINE_LENGTH,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()


def format_tree(resolved: Mapping[str, Plain], *, origins: Mapping[str, str]) -> str:
    """Format nested values as YAML, with comments that give the origin of non-default values.

    Args:
        resolved: Nested values.
        origins: By dotted key.
    """
    return "\n".join(_lines(resolved, prefix="", origins=origins)) + "\n"


def _lines(tree: Mapping[str, Plain], *, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{format_value(name)}:"
            yield from _lines(value, prefix=f"{key}.", origins=origins)
        else:
            line = f"{indent}{format_value(name)}: {format_value(value)}"
            yield line if origins[key] == "default" else f"{line}  # {origins[key]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A loaded configuration: the frozen settings, plain values and their origins."""

    config: TrainerConfig
    resolved: Mapping[str, Plain]
    """Nested plain values (dict, list, str, number, bool, None). A secret is the `${oc.env:NAME}`
    it was given as.
    """
    origins: Mapping[str, str]
    """Origin by dotted key: ``default``, ``group model_engine=fsdp``, ``file PATH`` or ``command
    line``.
    """
    digest: str
    """SHA-256, hexadecimal, of the values that influence a training result."""


def write_resolved(loaded: LoadedConfig, directory: Path) -> None:
    """Write ``config.yaml`` with all values and ``config_origins.yaml`` with all origins.

    ``config.yaml`` is itself a configuration: ``temper-train --config-dir FOLDER --config-name
    config`` repeats the run. If a run is resumed with other settings, the earlier files are kept as
    ``*.superseded-N.yaml``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    origins = yaml.dump(
        dict(loaded.origins),
        Dumper=_Dumper,
        width=MAX_LINE_LENGTH,
        allow_unicode=True,
        sort_keys=False,
    )
    _write(directory / "config.yaml", format_config(loaded))
    _write(directory / "config_origins.yaml", f"{DIGEST_PREFIX}{loaded.digest}\n{origins}")


def _write(path: Path, text: str) -> None:
    """Write a file atomically; an existing file with different content is renamed.

    Raises:
        OSError: If the disk is full. The error names the file, and the earlier file is unchanged.
    """
    if path.is_file() and path.read_bytes() == text.encode():
        return
    new = path.with_name(f"{path.name}.new")
    try:
        write_durably(new, text)
    # The error of a failed write does not name the file.
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    if path.exists():
        path.rename(choose_superseded_path(path))
    new.replace(path)


def format_config(loaded: LoadedConfig) -> str:
    """Return the text of ``config.yaml``."""
    return (
        f"{DIGEST_PREFIX}{loaded.digest}\ndefaults: [temper, "
        f"_self_]\n{format_tree(loaded.resolved, origins=loaded.origins)}"
    )
