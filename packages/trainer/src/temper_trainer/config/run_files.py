"""Which files mark a run folder as taken; read before a run begins, without torch."""

from pathlib import Path

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
"""Those of them that a start writes before the first step."""


UNTRAINED = ".untrained"
"""Marks a folder in which a run was started and has not completed a step yet."""


def contains_run(folder: Path) -> bool:
    """Return whether a run has trained in a folder, or other files are in its way.

    A start that failed before its first step does not count: the corrected command may use the folder.
    """
    return not (folder / UNTRAINED).exists() and any((folder / name).exists() for name in RUN_FILES)
