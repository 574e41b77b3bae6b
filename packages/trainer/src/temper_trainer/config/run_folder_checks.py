"""Files that mark a run folder as used; read before a run starts, without torch."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from temper_engine_api.settings_check import find_write_error
from temper_trainer.config.rollout import RECORD_FILE

RUN_FILES = (
    "config.yaml",
    "config_origins.yaml",
    "tokenizer",
    "metrics.jsonl",
    "warm_start",
    "checkpoints",
    "huggingface",
)
"""Files and folders that a run writes and that a new run would overwrite."""


START_FILES = ("config.yaml", "config_origins.yaml", "tokenizer")
"""Subset of RUN_FILES that is written before the first step."""


UNTRAINED = ".untrained"
"""Marks a folder in which a run was started but has not completed a step."""


_PHASES = ("warm_start", "rl", "sft", "dpo", "rm", "eval", "generate")
_FOLDERS = (
    *("checkpoints", "warm_start", "warm_start/checkpoints"),
    *("tensorboard", *(f"tensorboard/{phase}" for phase in _PHASES)),
    "wandb",
)
_FILES = (
    *("config.yaml", "config_origins.yaml", ".trained_config.yaml", UNTRAINED),
    *("metrics.jsonl", "samples.jsonl", "timeline.jsonl", "rollouts.jsonl", RECORD_FILE),
    *("run.lock", "run_id", "starts.jsonl"),
    *("report.html", ".report.html.partial", "curves.png", ".curves.partial.png"),
    *("wandb_id.txt", "trackio_run.txt", "mlflow_run.txt", "mlflow.db", "prometheus_token"),
)


RESERVED_NAMES = frozenset({".", *RUN_FILES, *_FOLDERS, *_FILES} - {RECORD_FILE})
"""Names in a run folder that `generate.file` cannot have; RECORD_FILE is its default."""


def contains_run(folder: Path) -> bool:
    """Return True if a run has trained in a folder, or its files are there for another reason.

    A start that failed before its first step does not count: the corrected command may use the
    folder.
    """
    return not (folder / UNTRAINED).exists() and any((folder / name).exists() for name in RUN_FILES)


def find_wrong_entries(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of a run folder that must be a folder, and the reverse.

    Pipes and sockets in place of files count too: to read a pipe would wait forever.
    The tokenizer and the model are left out: the run renames and writes them again.
    """
    for name in _FOLDERS:
        path = folder / name
        if os.path.lexists(path) and not path.is_dir():
            kind = "a file" if path.exists() else "a broken link"
            yield f"{path} is {kind}, but must be a folder: rename or remove it."
    for name in _FILES:
        if problem := describe_other_kind(folder / name):
            yield problem


def describe_other_kind(path: Path) -> str | None:
    """Return the error message for a folder, pipe or socket with the name of a run's file."""
    if path.is_dir():
        kind = "folder"
    elif path.is_fifo() or path.is_socket():
        kind = "pipe or socket"
    else:
        return None
    return f"{path} is a {kind}, but must be a file: rename or remove it."


def find_generated_file_problems(path: Path) -> Iterator[str]:
    """Yield why task generate cannot write its file, which it writes after all completions.

    Args:
        path: `run.dir` and `generate.file`.
    """
    if os.path.lexists(path):
        yield (
            f"{path} already exists and is never overwritten: choose another generate.file or "
            "run.dir."
        )
    elif problem := describe_other_kind(make_partial_path(path)):
        yield problem
    elif error := find_write_error(path.parent):
        yield f"{path} cannot be written: {error.strerror}. Choose another generate.file."


def make_partial_path(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(f".{path.name}.partial")


def find_inputs_in_run_folder(config: object, folder: Path) -> Iterator[str]:
    """Yield a sentence for each setting that names a file or directory inside a run folder.

    A run appends to, renames and replaces files of its folder, so it must not read its inputs from
    there. A value counts as a path if a file or directory of that name exists and either the value
    has a slash or its key ends in path or paths. `run` is left out: its paths are those of the run
    itself.

    Args:
        config: A `TrainerConfig`.
        folder: `run.dir`.
    """
    for key, value in _iterate_strings(config):
        # A bare word such as an algorithm's name may also be the name of a file, so it needs a
        # slash.
        if key.startswith("run.") or not (key.endswith(("path", "paths")) or "/" in value):
            continue
        if os.path.lexists(value) and _is_inside(value, folder):
            yield (
                f"{key} is {value}, which is inside run.dir ({folder}), where the run writes, "
                "renames and replaces files: move it out of run.dir, or choose another run.dir."
            )


def _iterate_strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a configuration with its key; items of a list have the list's key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _iterate_strings(child, key)
    elif is_dataclass(value) or isinstance(value, Mapping):
        children = (
            {str(name): child for name, child in value.items()}
            if isinstance(value, Mapping)
            else {item.name: getattr(value, item.name) for item in fields(value)}
        )
        for name, child in children.items():
            yield from _iterate_strings(child, f"{key}.{name}" if key else name)


def _is_inside(path: str, folder: Path) -> bool:
    # Check the path as written and with links resolved: a link inside the folder is renamed with
    # its folder, and a link elsewhere may point into it.
    return any(
        Path(normal(path)).is_relative_to(normal(folder))
        for normal in (os.path.abspath, os.path.realpath)
    )
