"""Patterns of modules in PEFT's configuration (``alpha_pattern``): regular expressions, which come from a file that may be hostile."""

import re
from collections.abc import Iterable

from temper_legacy_shim.errors import DamagedFileError, LayoutError

_LITERAL = re.compile(r"\^?(?:\w|\\?\.)+\$?")
"""A name, or the end of one."""
_CONSUMED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escaped characters and classes of characters, in which nothing repeats."""
_REPEATS = re.compile(r"[*+{]")
_SLOW = re.compile(r"\)[*+?{]|\(\?(?!:)")
"""Repeated groups, and groups that look around: with nested ones a match can take for ever."""
_BACK = re.compile(r"\\[1-9]")
_MOST_REPEATS, _MOST_EXPRESSIONS, _LONGEST_NAME = 2, 64, 256


def matching(patterns: Iterable[str], module: str, *, source: str) -> str | None:
    """The first pattern that a module's name matches as PEFT matches it: whole, or from one of its dots on.

    Args:
        patterns: keys of ``alpha_pattern``.
        module: its name in the model.
        source: names the patterns in errors.

    Raises:
        LayoutError: one could take for ever.
        DamagedFileError: one is no regular expression.
    """
    num_expressions = 0
    for pattern in patterns:
        is_literal = _LITERAL.fullmatch(pattern) is not None
        num_expressions += not is_literal
        if not is_literal:
            _check_is_quick(pattern, module, num_expressions, source=source)
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error as error:
            raise DamagedFileError(f"{source} has {pattern!r:.80}, which is no regular expression ({error}): copy it again.") from error
    return None


def _check_is_quick(pattern: str, module: str, number: int, *, source: str) -> None:
    bare = _CONSUMED.sub("", pattern)
    repeats = len(_REPEATS.findall(bare))
    if _SLOW.search(bare) or _BACK.search(pattern) or repeats > _MOST_REPEATS or number > _MOST_EXPRESSIONS or len(module) > _LONGEST_NAME:
        raise LayoutError(
            f"{source} has {pattern!r:.80}, a regular expression that may take for ever (repeated groups, more than {_MOST_REPEATS} "
            f"repeats, or more than {_MOST_EXPRESSIONS} of them): write the modules' names out there, or use --to peft."
        )
