"""A script as our reader reads it against the same script as bash runs it with stubs."""

import re
from dataclasses import dataclass

from bash_itself import run_in_bash

from temper_legacy_shim.scripts.launches import Launch, find_launches
from temper_legacy_shim.scripts.reading import read_script
from temper_legacy_shim.scripts.state import Event
from temper_legacy_shim.scripts.tree import Span
from temper_legacy_shim.scripts.values import Field, Text, literal

AMBIENT = {"HOME": "/home/someone", "USER": "someone"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One script, read and run with the same variables and arguments."""

    read: list[Launch]
    run: list[Launch]
    was_stopped: bool

    def wrong_keys(self) -> list[str]:
        """What differs in the number of launches, their entries, config names, and keys in order."""
        if len(self.read) != len(self.run):
            return [f"{len(self.read)} launches were read, {len(self.run)} ran"]
        out = []
        for read, run in zip(self.read, self.run, strict=True):
            keys = [[_shown(override.text).partition("=")[0] for override in launch.overrides] for launch in (read, run)]
            if (read.entry, read.config_name, keys[0]) != (run.entry, run.config_name, keys[1]):
                out.append(f"{read.entry} {read.config_name} {keys[0]} was read, {run.entry} {run.config_name} {keys[1]} ran")
        return out

    def values(self) -> list[tuple[Text, str]]:
        """Pairs of an argument as read and as run, where the keys are right."""
        return [
            (read.text, _shown(run.text))
            for one, other in zip(self.read, self.run, strict=True)
            for read, run in zip(one.overrides, other.overrides, strict=True)
        ]

    def wrong_values(self) -> list[str]:
        """Arguments that differ; what is unknown to a reader may be anything."""
        return [f"{_shown(read)!r} was read, {run!r} ran" for read, run in self.values() if not fits(read, run)]


def compare(text: str) -> Comparison:
    """Read and run a script.

    Variables that it reads bare and never sets get a number each, in both; so do the positional parameters that it asks for.
    """
    first = read_script(text, settings=AMBIENT)
    bare = sorted(name for name, is_bare in first.free.items() if is_bare)
    environment = AMBIENT | {name: str(number) for number, name in enumerate(bare, 11)}
    arguments = [str(101 + number) for number in range(first.num_arguments)]
    settings = environment | {str(place): argument for place, argument in enumerate(arguments, 1)} | ({} if arguments else {"0": ""})
    reading = read_script(text, settings=settings)
    run = run_in_bash(text, environment=environment, arguments=arguments)
    events = [
        Event(
            fields=tuple(Field(literal(word), word) for word in command),
            environment=(),
            span=Span(0, 0),
            arguments=Span(0, 0),
            item=Span(0, 0),
            stdin=None,
            is_inner=False,
        )
        for command in run.commands
    ]
    # Commands in the background come in any order.
    read_launches = sorted(reading.launches, key=_words)
    return Comparison(read_launches, sorted(find_launches(events), key=_words), run.was_stopped)


def fits(read: Text, run: str) -> bool:
    """Whether a value that was read is the one that ran, unknown parts aside."""
    return re.fullmatch("".join(re.escape(piece.value) if piece.is_known else ".*" for piece in read.pieces), run, re.DOTALL) is not None


def _words(launch: Launch) -> list[str]:
    return [_shown(field.text) for field in launch.command]


def _shown(text: Text) -> str:
    return text.shown()
