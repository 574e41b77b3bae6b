"""The home directory in a path, ``~/``, which shells leave alone behind ``key=``."""

import os

from temper_trainer.config_loading.schema import Plain

PATH_KEYS = frozenset({"dir", "file", "path", "paths", "resume", "rollout_python", "tools_path"})
"""Last parts of keys whose values are paths."""


def with_home(value: Plain, *, key: str = "") -> Plain:
    """The same values, with every path that begins with ``~`` made whole.

    Args:
        value: a tree of the configuration, or a value of it.
        key: the last part of the value's own key.
    """
    if isinstance(value, dict):
        return {name: with_home(below, key=name) for name, below in value.items()}
    if isinstance(value, list):
        return [with_home(item, key=key) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and key in PATH_KEYS else value
