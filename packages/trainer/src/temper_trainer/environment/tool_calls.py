"""Parse calls of tools that a policy writes as JSON."""

import json
import re
from dataclasses import dataclass


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
