"""Old trainers that stand somewhere in a script's text, in whatever branch, loop or function, whether a reading came by or not."""

import re
from collections.abc import Iterator
from itertools import pairwise

from temper_legacy_shim.scripts.launches import OLD_MODULE
from temper_legacy_shim.scripts.tree import Block, Case, Command, CountingFor, For, Function, If, Loop, Program, Redirected, Simple, Word

_NAMED = re.compile(rf"(?!\s*(?:echo|printf|:)\s)[^#]*\s-m\s+({OLD_MODULE.pattern})\b")
_OLD_FILE = re.compile(r"(?:.*/)?(?:verl|recipe)/(?:\w+/)*(?:main\w*|\w*trainer\w*|\w*main)\.py")


def left_behind(program: Program) -> Iterator[tuple[int, str]]:
    """Where commands stand that name an old trainer's module or file as an argument of their own, and what they name.

    Args:
        program: of the new script. Text inside quotes (``bash -c``, ``echo``) is not looked at.
    """
    for item in program.items:
        for _, pipeline in item.pipelines:
            for command in pipeline.commands:
                yield from _of_command(command)


def only_named(text: str) -> list[str]:
    """Sentences about old trainers that a script without launches names in a line of a command, such as in a file that it writes."""
    found = [(number, match[1]) for number, line in enumerate(text.splitlines(), 1) if (match := _NAMED.match(line))]
    return [
        f"line {number}: {name} is named there, but nothing in this script was seen to start it: translate what does, such as the file "
        "that this script writes"
        for number, name in found
    ]


def _of_command(command: Command) -> Iterator[tuple[int, str]]:
    if isinstance(command, Simple):
        names = [word.literal() or "" for word in command.words if isinstance(word, Word)]
        for before, name in pairwise(names):
            if (before in ("-m", "--module") and OLD_MODULE.fullmatch(name)) or (names[0] != "echo" and _OLD_FILE.fullmatch(name)):
                yield command.span.start, name
                return
    elif isinstance(command, Redirected):
        yield from _of_command(command.command)
    elif isinstance(command, Function):
        yield from _of_command(command.body)
    elif isinstance(command, If):
        for condition, body in command.branches:
            yield from left_behind(condition) if condition is not None else ()
            yield from left_behind(body)
    elif isinstance(command, Case):
        for _, body, _ in command.branches:
            yield from left_behind(body)
    elif isinstance(command, Loop):
        yield from left_behind(command.condition)
        yield from left_behind(command.body)
    elif isinstance(command, Block | For | CountingFor):
        yield from left_behind(command.body)
