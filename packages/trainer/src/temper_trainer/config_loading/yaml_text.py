"""Plain values as YAML text, each with its origin as a comment."""

import json
import math
from collections.abc import Iterator, Mapping

import yaml

from temper_trainer.config_loading.schema import Plain, plain


def scalar_text(value: object) -> str:
    """A value, list or mapping on one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(
        plain(value), default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
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
