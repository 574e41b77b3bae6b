"""What a folder holds, as far as a configuration has to know it before a run begins."""

from pathlib import Path


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in a folder."""
    return any((folder / name).exists() for name in ("config.yaml", "checkpoints", "metrics.jsonl"))
