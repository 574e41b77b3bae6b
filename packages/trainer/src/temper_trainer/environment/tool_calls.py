"""Parse calls of tools that a policy writes as JSON."""

import json


def parse_call(text: str) -> tuple[str, dict[str, object]]:
    """Return name and arguments of a call in JSON.

    Raises:
        ValueError: If it is not one.

    Example:
        >>> parse_call('{"name": "add", "arguments": {"a": 1}}')
        ('add', {'a': 1})
    """
    call = json.loads(text)
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return name, arguments
    raise ValueError("a call is an object with a name and an object of arguments")
