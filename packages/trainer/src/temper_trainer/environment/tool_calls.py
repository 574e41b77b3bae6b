"""Parse JSON that a policy writes, such as calls of tools."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

MAX_JSON_DEPTH = 100
"""Largest depth of lists and objects in each other. Libraries that send a value on have limits of a
few hundred, and fail in other ways."""


def parse_json(text: str) -> object:
    """Return a JSON value that can be sent on.

    Raises:
        ValueError: If the text is not JSON, has half of a surrogate pair, or is nested too deep.
    """
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    # Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair: "\\ud83d".
    json.dumps(value, ensure_ascii=False).encode()
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for each in level for child in _list_children(each)]
        if not level:
            return value
    raise ValueError("JSON that is nested too deep")


def _list_children(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def parse_call(text: str) -> tuple[str, dict[str, object]]:
    """Return name and arguments of a call in JSON.

    Raises:
        ValueError: If it is not one.

    Example:
        >>> parse_call('{"name": "add", "arguments": {"a": 1}}')
        ('add', {'a': 1})
    """
    call = parse_json(text)
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return name, arguments
    raise ValueError("a call is an object with a name and an object of arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkers:
    """Texts around each call of a tool."""

    start: str
    end: str

    def split_calls(self, text: str) -> tuple[str, list[tuple[str, dict[str, object]]]]:
        """Return the text before the first call, and name and arguments for each call.

        Raises:
            ValueError: If there is a start without a call.

        Example:
            >>> markers = CallMarkers(start="<tool>", end="</tool>")
            >>> markers.split_calls('Now: <tool>{"name": "add", "arguments": {"a": 1}}</tool>')
            ('Now: ', [('add', {'a': 1})])
        """
        before, start, _ = text.partition(self.start)
        pattern = f"{re.escape(self.start)}(.*?){re.escape(self.end)}"
        calls = [parse_call(call) for call in re.findall(pattern, text, re.DOTALL)]
        if len(calls) != text.count(self.start):
            raise ValueError(f"a call has no {self.end}")
        return before if start else text, calls
