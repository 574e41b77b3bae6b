"""Read a script's commands, by default and in undecided branches."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from temper_legacy_shim.bash.evaluator import run_script
from temper_legacy_shim.bash.syntax.parser import parse
from temper_legacy_shim.bash.syntax.syntax_tree import Program
from temper_legacy_shim.bash.values.shell_state import (
    Decision,
    Event,
    ReaderHooks,
    Reading,
    SourcedFile,
)
from temper_legacy_shim.bash.values.shell_values import MAX_CHARACTERS
from temper_legacy_shim.errors import ScriptError
from temper_legacy_shim.scripts.launches import (
    Launch,
    explain_npu_probe,
    find_launches,
    is_launch_text,
)

MAX_BYTES = 2_000_000
MAX_PASSES = 40
_MOST_FOLDERS = 20
_MOST_ABOVE = 6
_BORDERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""Names in the top folder of a project."""
_ENVIRONMENTS = re.compile(r"(?:conda\.sh|mamba\.sh|activate|\.?bashrc|\.?(?:bash_)?profile)$")
"""Files that only set up the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Launches of a script if one condition is decided differently."""

    decision: Decision
    taken: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReading:
    text: str
    program: Program
    launches: tuple[Launch, ...]
    """Old trainers it starts, in order."""
    written: tuple[Launch, ...]
    """Old trainers in texts it writes to files, or hands to a scheduler."""
    events: tuple[Event, ...]
    """All commands that are not the shell's own."""
    decisions: tuple[Decision, ...]
    alternatives: tuple[Alternative, ...]
    """Only those that launch something else."""
    notes: dict[str, int]
    free: dict[str, bool]
    """Variables that are used but never assigned; True if any use has no default."""
    executed: frozenset[int]
    num_arguments: int
    passes_guards: bool
    """True if the reading continued past an error exit of the script."""
    folders: tuple[str, ...]
    """Folders it changes to."""
    folder: Path | None
    """Folder of the script, around which sourced files were looked for."""

    def line_of(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1


def is_regular(path: Path) -> bool:
    """Check for a file that can be read to its end, and not a folder, pipe or broken link."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        # Arguments of commands are looked for too, and few of them are names a file can have.
        return False


def read_start(path: Path, *, most: int = MAX_BYTES, newline: str | None = None) -> str:
    """Return the text of a regular file, up to one character more than allowed.

    Args:
        path: Path of the file.
        most: Number of characters that are allowed.
        newline: As in ``open``; an empty string keeps the ends of lines as they are.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(path, encoding="utf-8", errors="surrogateescape", newline=newline) as file:
        return file.read(most + 1)


def read_bounded(path: Path, *, most: int = MAX_BYTES) -> str | None:
    """Return the text of a file; None if it is no regular file, not readable or too long."""
    if not is_regular(path):
        return None
    try:
        text = read_start(path, most=most)
    except OSError:
        return None
    return text if len(text) <= most else None


def find_script(called: str, folder: Path | None, within: Sequence[str] = ()) -> Path | None:
    """Return a called file; an unknown start of its path is this folder or a parent.

    Args:
        called: path as the command has it.
        folder: of the script.
        within: folders the script changes to.
    """
    if folder is None or not called:
        return None
    tail, is_known = known_end(called)
    if called.startswith("/") and is_known:
        return Path(called) if is_regular(Path(called)) else None
    positions = (each / tail for each in find_folders(folder, within))
    return next((position for position in positions if tail and is_regular(position)), None)


def known_end(called: str) -> tuple[str, bool]:
    """Return the end of a path after its last unknown part, and whether that is all of it."""
    parts = called.split("/")
    unknown = max(
        (
            number
            for number, part in enumerate(parts)
            if "$" in part or "`" in part or part == "..."
        ),
        default=-1,
    )
    return "/".join(parts[unknown + 1 :]), unknown < 0


def find_folders(folder: Path, within: Sequence[str]) -> list[Path]:
    """Return the folders in which called files are looked for, the most likely one first.

    Args:
        folder: of the script.
        within: folders the script changes to.
    """
    # Loops change to the same folder again and again.
    known = [name for name in dict.fromkeys(within) if not re.search(r"[$`]", name)][:_MOST_FOLDERS]
    bases = _find_bases(folder)
    return [*(base / name for name in known for base in bases), *bases]


def _find_bases(folder: Path) -> list[Path]:
    """Return a script's folder and those above it, up to the border of its project."""
    real = Path(os.path.realpath(folder))
    home = Path(os.path.realpath(os.path.expanduser("~")))
    out = [folder]
    for lower, upper in zip([real, *real.parents], real.parents[:_MOST_ABOVE], strict=False):
        is_border = any(os.path.lexists(lower / name) for name in _BORDERS)
        # Files in the user's home belong to no project.
        if is_border or upper == home or upper in home.parents:
            break
        out.append(upper)
    return out


def read_script(
    text: str, *, settings: dict[str, str] | None = None, folder: Path | None = None
) -> ScriptReading:
    """Read a script without executing any of it.

    Args:
        text: the script.
        settings: variables to take as set in the environment; digits are positional parameters.
        folder: of the script, around which files it sources are looked for; None for none.

    Raises:
        ScriptError: it is no bash, or builds more than a launch command.
    """
    if len(text) > MAX_BYTES:
        raise ScriptError(
            f"the script has {len(text)} characters: a launch script has fewer than {MAX_BYTES}."
        )
    try:
        return _read(text, settings or {}, folder)
    except RecursionError as error:
        raise ScriptError(
            "line 1: expansions or commands lie too deep inside each other: write the script "
            "flatter."
        ) from error


def reread(
    text: str,
    like: ScriptReading,
    settings: dict[str, str],
    replaced: Mapping[int, str] = MappingProxyType({}),
) -> list[Event]:
    """Read a script again, or one that was made from it, with the same decisions.

    Args:
        text: the script.
        like: the first reading.
        settings: variables to take as set in the environment.
        replaced: other values of assignments, by their position in `text`.
    """
    choices = tuple(decision.taken for decision in like.decisions)
    # Parsing takes most of the time, and a script with many variables is read as many times.
    program, hooks = like.program if text == like.text else parse(text), _hooks(like.folder)
    return _pass(
        program,
        text,
        settings,
        choices,
        hooks,
        passes_guards=like.passes_guards,
        replaced=replaced,
    ).events


def _hooks(folder: Path | None) -> ReaderHooks:
    files: dict[str, SourcedFile | None] = {}

    def read_sourced(name: str) -> SourcedFile | None:
        if name not in files:
            is_own = not name.startswith(("/", "~")) and not _ENVIRONMENTS.search(name)
            path = find_script(name, folder) if is_own else None
            text = read_bounded(path, most=MAX_CHARACTERS) if path else None
            shown = os.path.relpath(os.path.realpath(path or ""), os.path.realpath(folder or ""))
            files[name] = None if text is None else SourcedFile(path=shown, text=text)
        return files[name]

    return ReaderHooks(
        explain_failure=explain_npu_probe,
        is_launch_text=is_launch_text,
        read_sourced=read_sourced,
    )


def _read(text: str, settings: dict[str, str], folder: Path | None) -> ScriptReading:
    program, hooks = parse(text), _hooks(folder)
    main = _pass(program, text, settings, (), hooks)
    passes = 1
    if not find_launches(main.events):
        main, passes = _first_that_launches(program, text, settings, main, hooks)
    if not find_launches(main.events):
        # A guard that the script's own defaults do not pass, such as an empty model path.
        passing = _pass(program, text, settings, (), hooks, passes_guards=True)
        if len(passing.events) > len(main.events):
            main, passes = _first_that_launches(program, text, settings, passing, hooks)
    launches = tuple(find_launches(main.events))
    alternatives = _alternatives(
        program, text, settings, main, launches, MAX_PASSES - passes, hooks
    )
    return ScriptReading(
        text=text,
        program=program,
        launches=launches,
        written=tuple(find_launches(main.events, is_written=True)),
        events=tuple(main.events),
        decisions=tuple(main.decisions),
        alternatives=alternatives,
        notes=main.notes,
        free=main.free,
        executed=frozenset(main.executed),
        num_arguments=main.num_arguments,
        passes_guards=main.passes_guards,
        folders=tuple(main.folders),
        folder=folder,
    )


def _pass(
    program: Program,
    text: str,
    settings: dict[str, str],
    choices: tuple[int, ...],
    hooks: ReaderHooks,
    *,
    passes_guards: bool = False,
    replaced: Mapping[int, str] = MappingProxyType({}),
) -> Reading:
    reading = Reading(
        text, choices, settings, replaced=replaced, passes_guards=passes_guards, hooks=hooks
    )
    run_script(program, reading)
    return reading


def _first_that_launches(
    program: Program,
    text: str,
    settings: dict[str, str],
    main: Reading,
    hooks: ReaderHooks,
) -> tuple[Reading, int]:
    """Change decisions until something is launched; guards that exit are passed."""
    if find_launches(main.events):
        return main, 1
    waiting, seen, passes = [main], {tuple(decision.taken for decision in main.decisions)}, 1
    # Breadth first: the fewest changed decisions are the most plausible way to the launch.
    while waiting and passes < MAX_PASSES:
        current = waiting.pop(0)
        taken = [decision.taken for decision in current.decisions]
        # Late decisions first, because a guard that ends the script is the last one that was read.
        for position in reversed(range(len(taken))):
            for other in range(current.decisions[position].num_choices):
                choices = (*taken[:position], other)
                if other == taken[position] or passes >= MAX_PASSES:
                    continue
                result = _pass(
                    program, text, settings, choices, hooks, passes_guards=main.passes_guards
                )
                passes += 1
                if find_launches(result.events):
                    return result, passes
                path = tuple(decision.taken for decision in result.decisions)
                if path not in seen and len(path) > position + 1:
                    seen.add(path)
                    waiting.append(result)
    return main, passes


def _alternatives(
    program: Program,
    text: str,
    settings: dict[str, str],
    main: Reading,
    launches: tuple[Launch, ...],
    passes: int,
    hooks: ReaderHooks,
) -> tuple[Alternative, ...]:
    """Read the script again for each undecided condition that changes the launches."""
    taken = [decision.taken for decision in main.decisions]
    usual, out = [_signature(launch) for launch in launches], []
    for position, decision in enumerate(main.decisions):
        for other in range(decision.num_choices):
            if other == decision.taken or passes <= 0:
                continue
            passes -= 1
            result = _pass(
                program,
                text,
                settings,
                (*taken[:position], other),
                hooks,
                passes_guards=main.passes_guards,
            )
            others = tuple(find_launches(result.events))
            if others and [_signature(launch) for launch in others] != usual:
                out.append(Alternative(decision=decision, taken=other, launches=others))
    if passes <= 0 and main.decisions:
        main.note(f"more than {MAX_PASSES} ways through the script: not every branch was read", 0)
    return tuple(out)


def _signature(launch: Launch) -> tuple[object, ...]:
    return (
        launch.entry,
        launch.config_name,
        tuple(override.text.shown() for override in launch.overrides),
    )
