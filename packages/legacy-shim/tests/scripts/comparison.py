"""A script as our reader reads it against the same script as bash runs it with stubs."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from bash_itself import Run, run_in_bash

from temper_legacy_shim.bash.syntax.syntax_tree import Span
from temper_legacy_shim.bash.values.shell_state import Event
from temper_legacy_shim.bash.values.shell_values import Field, Text, literal
from temper_legacy_shim.scripts.launches import Launch, find_launches
from temper_legacy_shim.scripts.migrate import migrate_script
from temper_legacy_shim.scripts.rewrite import COMMAND
from temper_legacy_shim.scripts.script_reading import read_script

AMBIENT = {"HOME": "/home/someone", "USER": "someone"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One script, read and run with the same variables and arguments."""

    read: list[Launch]
    run: list[Launch]
    was_stopped: bool

    def wrong_keys(self) -> list[str]:
        """Return differences in number of launches, entries, config names and keys."""
        if len(self.read) != len(self.run):
            return [f"{len(self.read)} launches were read, {len(self.run)} ran"]
        out = []
        for read, run in zip(self.read, self.run, strict=True):
            keys = [
                [_shown(override.text).partition("=")[0] for override in launch.overrides]
                for launch in (read, run)
            ]
            if (read.entry, read.config_name, keys[0]) != (run.entry, run.config_name, keys[1]):
                out.append(
                    f"{read.entry} {read.config_name} {keys[0]} was read, {run.entry} "
                    f"{run.config_name} {keys[1]} ran"
                )
        return out

    def values(self) -> list[tuple[Text, str]]:
        """Return the pairs of an argument as read and as run, where the keys are right."""
        return [
            (read.text, _shown(run.text))
            for one, other in zip(self.read, self.run, strict=True)
            for read, run in zip(one.overrides, other.overrides, strict=True)
        ]

    def wrong_values(self) -> list[str]:
        """Return the arguments that differ; what is unknown to a reader may be anything."""
        return [
            f"{_shown(read)!r} was read, {run!r} ran"
            for read, run in self.values()
            if not fits(read, run)
        ]


def surroundings(text: str) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return the environment, the arguments, and both as settings of a reader.

    Variables that a script reads bare and never sets get a number each; so do the positional
    parameters that it asks for.
    """
    first = read_script(text, settings=AMBIENT)
    bare = sorted(name for name, is_bare in first.free.items() if is_bare)
    environment = AMBIENT | {name: str(number) for number, name in enumerate(bare, 11)}
    arguments = [str(101 + number) for number in range(first.num_arguments)]
    settings = (
        environment
        | {str(position): argument for position, argument in enumerate(arguments, 1)}
        | ({} if arguments else {"0": ""})
    )
    return environment, arguments, settings


def wrong_in_new(text: str) -> list[str] | None:
    """Return the differences of the new script under bash.

    Other commands, or other arguments of temper-train.

    None where there is nothing to compare: no launch, a launch for a person, a script that stops or
    starts nothing under stubs.
    """
    environment, arguments, settings = surroundings(text)
    migration = migrate_script(text, settings=settings)
    if migration.script is None or migration.script.persons:
        return None
    old = run_in_bash(text, environment=environment, arguments=arguments)
    new = run_in_bash(migration.script.text, environment=environment, arguments=arguments)
    if old.was_stopped or not find_launches([as_event(command) for command in old.commands]):
        return None
    launched = sorted(sorted(_overrides(command)) for command in new.commands if COMMAND in command)
    meant = sorted(
        (sorted((each.text for each in one.arguments), key=_shown) for one in migration.launches),
        key=_all_shown,
    )
    others = [
        sorted(_placeless(command, run) for command in run.commands if not _launches(command))
        for run in (old, new)
    ]
    out = [] if others[0] == others[1] else [f"other commands {others[0]} became {others[1]}"]
    if [len(texts) for texts in launched] != [len(texts) for texts in meant]:
        return [*out, f"{_keys(meant)} were meant, {_keys(launched)} ran"]
    pairs = [
        pair
        for texts, run in zip(meant, launched, strict=True)
        for pair in zip(texts, run, strict=True)
    ]
    return out + [
        f"{_shown(want)!r} was meant, {got!r} ran" for want, got in pairs if not fits(want, got)
    ]


def _overrides(command: list[str]) -> list[str]:
    """Return temper-train's overrides of its own keys; the script's arguments are numbers here."""
    return [word for word in command[command.index(COMMAND) + 1 :] if "=" in word]


def _all_shown(texts: list[Text]) -> list[str]:
    return [_shown(text) for text in texts]


def _keys(launches: Sequence[Sequence[Text | str]]) -> list[list[str]]:
    return [
        [(text if isinstance(text, str) else _shown(text)).partition("=")[0] for text in texts]
        for texts in launches
    ]


def _placeless(command: list[str], run: Run) -> list[str]:
    """Return a command without what differs in every run: its folder and the process (``$$``)."""
    process = re.compile(rf"(?<!\d){run.process_id}(?!\d)")
    folder = re.compile(rf"{re.escape(tempfile.gettempdir())}/stubs-\w+")
    return [process.sub("$$", folder.sub("", word)) for word in command]


def _launches(command: list[str]) -> bool:
    return COMMAND in command or bool(find_launches([as_event(command)]))


def compare(text: str) -> Comparison:
    """Read and run a script, with the same surroundings."""
    environment, arguments, settings = surroundings(text)
    reading = read_script(text, settings=settings)
    run = run_in_bash(text, environment=environment, arguments=arguments)
    events = [as_event(command) for command in run.commands]
    # Commands in the background come in any order.
    read_launches = sorted(reading.launches, key=_words)
    return Comparison(read_launches, sorted(find_launches(events), key=_words), run.was_stopped)


def as_event(command: list[str]) -> Event:
    """Return a command that ran as the reader sees one."""
    return Event(
        fields=tuple(Field(literal(word), word) for word in command),
        environment=(),
        span=Span(0, 0),
        arguments=Span(0, 0),
        item=Span(0, 0),
        stdin=None,
        is_inner=False,
    )


def fits(read: Text, run: str) -> bool:
    """Return whether a value that was read is the one that ran, unknown parts aside."""
    return (
        re.fullmatch(
            "".join(re.escape(piece.value) if piece.is_known else ".*" for piece in read.pieces),
            run,
            re.DOTALL,
        )
        is not None
    )


def _words(launch: Launch) -> list[str]:
    return [_shown(field.text) for field in launch.command]


def _shown(text: Text) -> str:
    return text.shown()
