"""Find commands that may start an old trainer, although no launch was recognized."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from temper_legacy_shim.bash.execution.external_commands import inner_script, is_hidden, started
from temper_legacy_shim.bash.syntax.syntax_tree import Program, Simple, Word, walk
from temper_legacy_shim.bash.values.shell_state import Event
from temper_legacy_shim.bash.values.shell_values import Field
from temper_legacy_shim.configs.reading.trees import known_keys
from temper_legacy_shim.errors import ScriptError
from temper_legacy_shim.scripts.called_files import (
    called_program,
    called_script,
    modal_file,
    reads_stdin,
    runs_other_text,
    trainer_in,
    trainer_in_text,
)
from temper_legacy_shim.scripts.launches import (
    OLD_MODULE,
    find_program,
    starts_unknown_program,
    takes_arguments_from_stdin,
)
from temper_legacy_shim.scripts.makefiles import (
    MAKEFILES,
    MakeCall,
    Makefile,
    parse_make_call,
    read_makefile,
)
from temper_legacy_shim.scripts.named_files import find_named_files, find_unknown_calls
from temper_legacy_shim.scripts.script_reading import (
    ScriptReading,
    find_folders,
    find_script,
    is_regular,
    known_end,
    read_bounded,
    read_script,
)

_PRINTED = re.compile(r"\s*(?:echo|printf)\b")
_KEY = re.compile(r"(?:^|[\s\"'(])(?:\+\+?|~)?([a-z_]\w*(?:\.\w+)+)=")
_PRINTS = ("echo", "printf", "temper-train", "tee", "cat", "grep", "sed", "awk")
_OTHER_SHELL = re.compile(r"#!\s*\S*?(?:/env\s+(?:-S\s+)?)?\b(zsh|fish|t?csh|ksh)\b")
_HOW_TO_MOVE_RULE = (
    "save the commands that `make -n {target}` prints as a script, translate that, and call it in "
    "the rule"
)
_MOST_KEYS = 4
_MOST_LEVELS = 3
_MOST_REMARKS = 3
_PYTHON_SHEBANG = re.compile(r"#!.*\bpython")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """An old trainer behind a command, and sentences about parts that were not examined."""

    entry: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cache:
    """Makefiles, rules and files that were looked into for one script."""

    makefiles: dict[Path, Makefile] = field(default_factory=dict)
    rules: dict[tuple[Path, str, tuple[tuple[str, str], ...], Path, int], _Behind] = field(
        default_factory=dict
    )

    files: dict[tuple[Path, int, bool], _Behind] = field(default_factory=dict)
    """Results by file, number of files that led there, and whether it is read as a shell script."""

    def read(self, path: Path) -> Makefile:
        if path not in self.makefiles:
            self.makefiles[path] = read_makefile(path)
        return self.makefiles[path]


def find_unfollowed(
    reading: ScriptReading,
    folder: Path | None,
    *,
    chain: tuple[str, ...] = (),
    cache: _Cache | None = None,
) -> tuple[list[str], list[str]]:
    """Return sentences about commands that may start an old trainer.

    They are questions, and parts that could not be examined.

    Args:
        reading: Of the script.
        folder: Of the script; scripts it calls are looked for around it. None looks for none.
        chain: Files and rules that led here.
        cache: Makefiles and rules that were looked into before.
    """
    cache = _Cache() if cache is None else cache
    decisions = dict.fromkeys(_open_launches(reading))
    remarks: dict[str, None] = {}
    seen = {launch.span for launch in (*reading.launches, *reading.written)}
    for event in reading.events:
        if event.span in seen or (event.fields[0].text.known or "").rpartition("/")[2] in _PRINTS:
            continue
        at = f"line {reading.line_of(event.span.start)}: "
        question, inner = _question(event, folder, chain, reading.folders, cache)
        if question:
            decisions[at + question] = None
        elif remark := _remark(event, folder, reading.folders, cache):
            remarks[at + remark] = None
        remarks |= dict.fromkeys(at + each for each in inner)
    if folder is not None:
        decisions |= dict.fromkeys(_named(reading, folder, chain, cache, list(decisions)))
        for start, call in find_unknown_calls(reading, folder):
            remarks[
                f"line {reading.line_of(start)}: {call}: what that starts is not known, and "
                "it is in a text, branch or loop that was not followed"
            ] = None
    return list(decisions), list(remarks)


def _named(
    reading: ScriptReading, folder: Path, chain: tuple[str, ...], cache: _Cache, known: list[str]
) -> Iterator[str]:
    """Yield questions about files that start an old trainer and are named in some other way."""
    for start, name, path in find_named_files(reading, folder):
        entry = _look_behind(path, chain, cache, is_shell=path.suffix != ".py").entry
        shown = os.path.relpath(path, folder)
        if entry and not any(path.name in each for each in known):
            also = "" if shown == name else f" ({shown})"
            yield (
                f"line {reading.line_of(start)}: {name}{also} is named there and starts {entry}, "
                "but how it is run was not followed: translate that file (temper-migrate script "
                f"{shown}), and run the new one."
                if path.suffix != ".py"
                else f"line {reading.line_of(start)}: {name} is named there and uses {entry}, but "
                "how it is run was not followed: start temper-train instead."
            )


def _open_launches(reading: ScriptReading) -> Iterator[str]:
    """Yield questions about launches of which only a part of the arguments is known."""
    shell = _OTHER_SHELL.match(reading.text)
    if shell and reading.launches:
        yield (
            f"line 1: the script is for {shell[1]}, but was read as bash, which splits words and "
            "arrays in another way: compare the new arguments with those of the old run."
        )
    for launch in reading.written:
        yield (
            f"line {reading.line_of(launch.span.start)}: a text that is written there starts "
            f"{launch.entry}: translate the file that it becomes."
        )
    for launch in reading.launches:
        at = f"line {reading.line_of(launch.span.start)}: "
        if takes_arguments_from_stdin(launch):
            yield (
                f"{at}xargs adds arguments to {launch.entry} that were not read: translate with "
                "these arguments written in the command."
            )
        for argument in launch.open_arguments:
            # "$@" and variables the script does not set come from the user, who knows them: a
            # note suffices.
            if not argument.text.is_unset:
                yield (
                    f"{at}{argument.source} gives {launch.entry} arguments that only a run knows: "
                    "translate with these arguments written in the command."
                )


def _question(
    event: Event,
    folder: Path | None,
    chain: tuple[str, ...],
    within: tuple[str, ...],
    cache: _Cache,
) -> tuple[str, tuple[str, ...]]:
    """Return a question about a command that may start an old trainer, else empty, and remarks."""
    if (make := _find_make_call(event)) is not None:
        return _question_of_make(make, event, folder, chain, within, cache)
    called = called_script(event, folder, within)
    program = "" if called else called_program(event, folder)
    path = find_script(called or program, folder, within)
    behind = _Behind()
    if path is not None:
        behind = _look_behind(path, chain, cache, is_shell=bool(called))
    entry = behind.entry
    if path is not None and folder is not None and called and path != folder / called:
        # The script may change to a folder with a file of the same name as one here.
        called = os.path.relpath(path, folder) if is_regular(folder / called) else called
    question = _question_of_file(event, called, program, entry)
    return question, () if question else behind.remarks


def _question_of_file(event: Event, called: str, program: str, entry: str) -> str:
    """Return a question about a command that is no make; empty if it starts no old trainer."""
    if not entry and reads_stdin(event) and event.stdin is not None:
        program, entry = _shown(event), trainer_in_text(event.stdin.shown())
    keys = list(_known_keys(event.fields))
    shown = ", ".join(keys[:_MOST_KEYS]) + (", ..." if len(keys) > _MOST_KEYS else "")
    if entry and program:
        return (
            f"{program} uses {entry}: start temper-train instead, with the settings that it gives "
            "to the old trainer."
        )
    if entry:
        with_keys = f", and gets settings of verl from here ({shown})" if keys else ""
        return (
            f"{called} starts {entry}{with_keys}: translate that script "
            f"(temper-migrate script {called}), and give it the new settings."
        )
    if len(keys) > 1 or (keys and starts_unknown_program(event.fields)):
        return (
            f"{_shown(event)} gets settings of verl ({shown}), and what it starts could not be "
            "followed: translate the script or program behind it, and give that one the new "
            "settings."
        )
    return ""


def _remark(event: Event, folder: Path | None, within: tuple[str, ...], cache: _Cache) -> str:
    """Return a sentence about a command that could not be followed; empty for others."""
    called = called_script(event, folder, within)
    program = "" if called else find_program(event.fields)
    # A module that is not here is an installed one; a file should be here.
    is_file = program.endswith(".py") and any(f.text.shown() == program for f in event.fields)
    missing = called or (program if is_file else "")
    if (
        missing
        and missing != event.input_file
        and folder is not None
        and find_script(missing, folder, within) is None
    ):
        return f"{missing} was not found next to this script, so what it starts is not known"
    if (make := _find_make_call(event)) is not None and folder is not None:
        return _remark_of_make(make, event, folder, within, cache)
    modal = modal_file(event)
    if modal and folder is not None and find_script(modal, folder, within) is None:
        return f"{modal} was not found next to this script, so what modal starts is not known"
    if _runs_other_text(event):
        return f"{_shown(event)} runs commands that are not in this script"
    return ""


def _find_make_call(event: Event) -> MakeCall | None:
    return parse_make_call([field.text.shown() for field in started(event.fields)])


def _question_of_make(
    call: MakeCall,
    event: Event,
    folder: Path | None,
    chain: tuple[str, ...],
    within: tuple[str, ...],
    cache: _Cache,
) -> tuple[str, tuple[str, ...]]:
    """Return a question about a makefile's target that starts an old trainer, and remarks."""
    path = _find_makefile(call, folder, within)
    if path is None:
        return "", ()
    remarks: list[str] = []
    makefile = cache.read(path)
    for target in call.targets or (makefile.default_target(),):
        # Rules that call make for each other lead to exponentially many paths. A result depends on
        # the number of files that led there, after which no more are read.
        key = (
            path,
            target,
            tuple(sorted(call.variables.items())),
            folder or path.parent,
            len(chain),
        )
        if (behind := cache.rules.get(key)) is None:
            commands = makefile.write_commands(target, variables=call.variables)
            behind = _look_into(commands, path.parent, chain, cache, path=path, name=target)
            gaps = makefile.find_gaps(target, folder or path.parent, variables=call.variables)
            behind = replace(behind, remarks=(*behind.remarks, *gaps))
            cache.rules[key] = behind
        rule = makefile.find_rule(target)
        if behind.entry and rule is not None:
            line = rule.line
            question = (
                f"{_shown(event)} runs the rule {target} of {path.name} (line {line}), which "
                f"starts {behind.entry}: {_HOW_TO_MOVE_RULE.format(target=target)}."
            )
            return question, ()
        remarks += behind.remarks
    return "", tuple(dict.fromkeys(remarks))


def find_launching_rules(path: Path) -> dict[str, str]:
    """Return a sentence for each rule of a makefile whose own commands start an old trainer."""
    sentences = {}
    makefile = read_makefile(path)
    for target, rule in makefile.rules.items():
        own = replace(makefile, rules={target: rule}, patterns=())
        commands = own.write_commands(target, variables={})
        behind = _look_into(commands, path.parent, (), _Cache(), path=path, name=target)
        if behind.entry:
            sentences[target] = (
                f"line {rule.line}: the rule {target} starts {behind.entry}: "
                f"{_HOW_TO_MOVE_RULE.format(target=target)}"
            )
    return sentences


def _remark_of_make(
    call: MakeCall, event: Event, folder: Path, within: tuple[str, ...], cache: _Cache
) -> str:
    """Return a sentence about targets that were not found; empty if their rules were read."""
    path = _find_makefile(call, folder, within)
    if path is None:
        return (
            f"{_shown(event)}: no makefile was found next to this script, so what it starts is "
            "not known"
        )
    makefile = cache.read(path)
    if not makefile.rules:
        return f"{path.name} has no rule that could be read, so what it starts is not known"
    unknown = ", ".join(target for target in call.targets if makefile.find_rule(target) is None)
    return f"{path.name} has no rule {unknown}, so what it starts is not known" if unknown else ""


def _find_makefile(call: MakeCall, folder: Path | None, within: tuple[str, ...]) -> Path | None:
    if folder is None:
        return None
    prefix = f"{call.folder}/" if call.folder else ""
    names = (call.file,) if call.file else MAKEFILES
    ends = [end for name in names if (end := known_end(prefix + name)[0])]
    # Any makefile of a nearer folder comes before those above.
    paths = (each / end for each in find_folders(folder, within) for end in ends)
    return next((path for path in paths if is_regular(path)), None)


def _runs_other_text(event: Event) -> bool:
    """Check for a shell that reads a file or a pipe, and for an agent that gets commands."""
    if runs_other_text(event):
        return True
    inner = None if event.stdin is None else inner_script(list(event.fields), event.stdin)
    return inner is not None and is_hidden(inner)


def _look_behind(path: Path, chain: tuple[str, ...], cache: _Cache, *, is_shell: bool) -> _Behind:
    """Look into a file a command runs, and into those that it calls."""
    key = (path, len(chain), is_shell)
    if key not in cache.files:
        cache.files[key] = _read_behind(path, chain, cache, is_shell=is_shell)
    return cache.files[key]


def _read_behind(path: Path, chain: tuple[str, ...], cache: _Cache, *, is_shell: bool) -> _Behind:
    if (text := read_bounded(path)) is None:
        reason = "is too long or not readable"
        return _Behind(remarks=(f"{path.name} {reason}, so what it starts is not known",))
    if not is_shell or path.suffix == ".py" or _PYTHON_SHEBANG.match(text):
        entry, is_complete = trainer_in(path)
        remark = (
            f"{path.name} imports many modules of the project, of which some were not read, so "
            "what it starts is not known"
        )
        return _Behind(entry=entry, remarks=() if is_complete else (remark,))
    return _look_into(text, path.parent, chain, cache, path=path, name=path.name)


def _look_into(
    text: str, folder: Path, chain: tuple[str, ...], cache: _Cache, *, path: Path, name: str
) -> _Behind:
    """Look into the text of a script, and into files it calls.

    Args:
        text: The script.
        folder: Folder in which scripts it calls are looked for.
        chain: Files and rules that led here.
        cache: Makefiles and rules that were looked into before.
        path: File with the text.
        name: Name of the script for the result.
    """
    position = f"{os.path.realpath(path)}:{name}"
    # Scripts may call each other in a circle.
    if position in chain:
        return _Behind()
    if len(chain) >= _MOST_LEVELS:
        remark = f"{name} was not read, because {len(chain)} files led there: translate it"
        return _Behind(remarks=(remark,))
    try:
        reading = read_script(text, folder=folder)
    except ScriptError as error:
        return _Behind(
            remarks=(f"{name} could not be read as bash, so it may start a trainer: {error}",)
        )
    if launches := reading.launches or reading.written:
        return _Behind(entry=launches[0].entry)
    decisions, remarks = find_unfollowed(reading, folder, chain=(*chain, position), cache=cache)
    return _Behind(
        entry=f"another script with an old trainer ({name})" if decisions else "",
        remarks=tuple(f"{name}: {remark}" for remark in remarks[:_MOST_REMARKS]),
    )


def _known_keys(fields: tuple[Field, ...]) -> Iterator[str]:
    """Yield the arguments' keys that some release of the old system had."""
    for each in fields[1:]:
        key = each.text.shown().partition("=")[0].lstrip("+~")
        if "=" in each.text.shown() and "." in key and key in known_keys():
            yield key


def _shown(event: Event) -> str:
    words = [field.source for field in event.fields[:3]]
    return " ".join(words) + (" ..." if len(event.fields) > len(words) else "")


_NAMED = re.compile(
    r"(?!\s*(?:echo|printf|:)\s)[^#]*?(?<![\w/.])("
    r"(?:\w+\.)+(?:main_ppo\w*|main_dapo|fsdp_sft_trainer|fully_async_main|main_generation\w*)|(?:verl|recipe)(?:\.\w+)*\.(?:main\w*|\w*trainer\w*|\w*main)"
    r")\b(?!\.py)"
)
"""A line that names an entry of the old releases, or of a package that wraps them."""
_OLD_FILE = re.compile(r"(?:.*/)?(?:verl|recipe)/(?:\w+/)*(?:main\w*|\w*trainer\w*|\w*main)\.py")


def left_behind(program: Program) -> Iterator[tuple[int, str]]:
    """Yield positions and names of commands that have an old trainer as an argument.

    Args:
        program: of the new script. Text inside quotes (``bash -c``, ``echo``) is not looked at,
            commands in ``$(...)`` are.
    """
    commands = [node for node in walk(program) if isinstance(node, Simple)]
    for command in sorted(commands, key=lambda each: each.span.start):
        names = [word.literal() or "" for word in command.words if isinstance(word, Word)]
        for before, name in pairwise(names):
            if (before in ("-m", "--module") and OLD_MODULE.fullmatch(name)) or (
                names[0] != "echo" and _OLD_FILE.fullmatch(name)
            ):
                yield command.span.start, name
                break


def only_named(text: str) -> list[str]:
    """Return sentences about trainers a script names, but does not launch."""
    lines = list(enumerate(text.splitlines(), 1))
    result = [(number, match[1]) for number, line in lines if (match := _NAMED.match(line))]
    code = [
        (number, line.partition("#")[0])
        for number, line in reversed(lines)
        if not _PRINTED.match(line)
    ]
    keys = {
        key: number for number, line in code for key in _KEY.findall(line) if key in known_keys()
    }
    if not result and len(keys) > 1:
        shown = ", ".join(sorted(keys)[:_MOST_KEYS]) + (", ..." if len(keys) > _MOST_KEYS else "")
        sentence = (
            f"line {min(keys.values())}: settings of verl ({shown}) are given there, but no "
            "command was seen that gets them: translate with --set NAME=VALUE for what the script "
            "asks for, or translate the script that they are for"
        )
        return [sentence]
    return [
        f"line {number}: {name} is named there, but nothing in this script was seen to start it: "
        "translate what does, such as the file that this script writes"
        for number, name in result
    ]
