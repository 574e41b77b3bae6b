"""Tools that a chat template describes to the policy: schemas from a file."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from temper_engine_api.errors import ConfigError

ToolSchema = Mapping[str, object]
"""In the form that chat templates take: {type: function, function: {name, description, parameters}}."""


@cache
def read_tools(path: str) -> tuple[ToolSchema, ...]:
    """The schemas of a YAML or JSON file, in its order.

    Args:
        path: a list, or a mapping with one under ``tools``. An entry is a schema, or holds one under ``tool_schema`` beside what the tool
            itself needs.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"data.tools_path is {path!r}, which can't be read as YAML or JSON: {error}"
        ) from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"data.tools_path is {path!r}, which holds no list of tools, alone or under `tools`: write one entry for each."
        )
    return tuple(
        _schema(entry, number=number, path=path) for number, entry in enumerate(entries, 1)
    )


def _schema(entry: object, *, number: int, path: str) -> ToolSchema:
    found = entry.get("tool_schema", entry) if isinstance(entry, dict) else entry
    function = found.get("function") if isinstance(found, dict) else None
    if (
        not isinstance(found, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise ConfigError(
            f"data.tools_path {path!r}: entry {number} is {found!r:.80}, but a schema is expected, "
            "{type: function, function: {name: ..., description: ..., parameters: ...}}."
        )
    return found
