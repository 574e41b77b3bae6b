"""A griffe extension for the site: read `Example:` in docstrings as a section of examples.

Google's style, and so griffe, calls that section `Examples:`. The other spelling would be rendered
as Markdown, in which a list such as `[[1], [2]]` is a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"(?m)^( *)Example:$")


class ExampleSections(griffe.Extension):
    """Rename the heading in every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was just loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
