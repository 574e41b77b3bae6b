"""Compare dotted keys, and suggest names for those that do not exist."""

import difflib
from collections.abc import Iterable


def is_within(key: str, *blocks: str) -> bool:
    """Return True if a dotted key is one of some keys, or is below one of them."""
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known name, after a space; empty if none is near.

    Example:
        >>> suggest_name("gpso", ["ppo", "gspo"])
        " Did you mean 'gspo'?"
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
