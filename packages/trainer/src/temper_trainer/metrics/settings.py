"""A run's settings as its folder holds them, by dotted key."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml


def read_settings(directory: Path) -> dict[str, object]:
    """Every key of ``config.yaml``; empty where the folder has none."""
    path = directory / "config.yaml"
    return dict(leaves(yaml.safe_load(path.read_text(encoding="utf-8")))) if path.exists() else {}


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Dotted keys and values; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
