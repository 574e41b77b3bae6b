"""A run's settings as its folder holds them, by dotted key."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

logger = logging.getLogger(__name__)


def read_settings(directory: Path) -> dict[str, object]:
    """Return every key of ``config.yaml``; empty where the folder has none, or an unreadable one."""
    path = directory / "config.yaml"
    if not path.exists():
        return {}
    try:
        tree = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        logger.warning("%s cannot be read as settings: treated as if it held none", path)
        return {}
    return dict(leaves(tree))


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Dotted keys and values; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
