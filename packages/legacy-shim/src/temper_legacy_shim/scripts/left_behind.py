"""Old trainers that stand somewhere in a script's text, in whatever branch, loop or function, whether a reading came by or not."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise

from temper_legacy_shim.scripts.launches import OLD_MODULE
from temper_legacy_shim.scripts.tree import Program, Simple, Word

_NAMED = re.compile(
    r"(?!\s*(?:echo|printf|:)\s)[^#]*?(?<![\w/.])("
    r"(?:\w+\.)+(?:main_ppo\w*|main_dapo|fsdp_sft_trainer|fully_async_main|main_generation\w*)|(?:verl|recipe)(?:\.\w+)*\.(?:main\w*|\w*trainer\w*|\w*main)"
    r")\b(?!\.py)"
)
"""A line that names an entry of the old releases, or of a package that wraps them."""
_OLD_FILE = re.compile(r"(?:.*/)?(?:verl|recipe)/(?:\w+/)*(?:main\w*|\w*trainer\w*|\w*main)\.py")


def left_behind(program: Program) -> Iterator[tuple[int, str]]:
    """Where commands stand that name an old trainer's module or file as an argument of their own, and what they name; in order.

    Args:
        program: of the new script. Text inside quotes (``bash -c``, ``echo``) is not looked at, commands in ``$(...)`` are.
    """
    for command in sorted(_simple_commands(program), key=lambda each: each.span.start):
        names = [word.literal() or "" for word in command.words if isinstance(word, Word)]
        for before, name in pairwise(names):
            if (before in ("-m", "--module") and OLD_MODULE.fullmatch(name)) or (names[0] != "echo" and _OLD_FILE.fullmatch(name)):
                yield command.span.start, name
                break


def only_named(text: str) -> list[str]:
    """Sentences about old trainers that a script without launches names in a line of a command, such as in a file that it writes."""
    found = [(number, match[1]) for number, line in enumerate(text.splitlines(), 1) if (match := _NAMED.match(line))]
    return [
        f"line {number}: {name} is named there, but nothing in this script was seen to start it: translate what does, such as the file "
        "that this script writes"
        for number, name in found
    ]


def _simple_commands(program: Program) -> Iterator[Simple]:
    """Every one below the program, however deep: on a stack of its own, since nesting may exceed Python's."""
    left: list[object] = [program]
    while left:
        node = left.pop()
        if isinstance(node, Simple):
            yield node
        if isinstance(node, tuple):
            left += node
        elif is_dataclass(node):
            left += [getattr(node, field.name) for field in fields(node)]
