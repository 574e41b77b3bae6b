"""Migrate a script: read it, translate its launches, rewrite it, and check the new script.

The new script is read again, to see that it launches what was translated. The old script is also
read with other values of its environment variables and arguments. A value of the new command that
depends on one of them, and is now a fixed number or word, is reported. Nothing is executed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from temper_legacy_shim.bash.syntax.parser import parse
from temper_legacy_shim.bash.syntax.syntax_tree import Assignment, For, Loop, Span, Word, walk
from temper_legacy_shim.configs import Outcome, Translation
from temper_legacy_shim.errors import ScriptError
from temper_legacy_shim.scripts.launch_translation import (
    NewArgument,
    Options,
    TranslatedLaunch,
    translate_launch,
    worst,
)
from temper_legacy_shim.scripts.launches import Launch, find_launches
from temper_legacy_shim.scripts.rewrite import COMMAND, NewScript, rewrite
from temper_legacy_shim.scripts.script_reading import ScriptReading, read_script, reread
from temper_legacy_shim.scripts.unfollowed import find_unfollowed, left_behind, only_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One script's result."""

    reading: ScriptReading
    launches: tuple[TranslatedLaunch, ...]
    script: NewScript | None
    """None where the script launches no old trainer."""
    outcome: Outcome
    unfollowed: tuple[str, ...] = ()
    """Sentences about commands behind which an old trainer stands, or may stand."""
    not_read: tuple[str, ...] = ()
    """Sentences about called scripts that were not found."""


def migrate_script(
    text: str,
    *,
    settings: dict[str, str] | None = None,
    options: Options | None = None,
    folder: Path | None = None,
) -> Migration:
    """Translate a launch script.

    Args:
        text: the old script.
        settings: variables to take as set in the environment; digits are positional parameters.
        options: see there.
        folder: of the script, around which the user's own configuration is looked for.

    Raises:
        ScriptError: it is no bash, or can't be followed without executing it.
        UsageError: the version is none.
    """
    options = options or Options()
    reading = read_script(text, settings=settings, folder=folder)
    if not reading.launches:
        reading = replace(reading, launches=reading.written, written=())
    launches = _translated(reading.launches, options, folder)
    decisions, not_read = find_unfollowed(reading, folder)
    if not launches:
        decisions = decisions or only_named(text)
        outcome = Outcome.PERSON if decisions else Outcome.PINNED if not_read else Outcome.CLEAN
        return Migration(
            reading=reading,
            launches=(),
            script=None,
            outcome=outcome,
            unfollowed=tuple(decisions),
            not_read=tuple(not_read),
        )
    script = rewrite(reading, launches)
    different = _different(script.text, reading, launches, settings or {})
    if different:
        # The text has a different value at the new command, so the old value is written.
        launches = _translated(reading.launches, options, folder, literal_keys=frozenset(different))
        script = rewrite(reading, launches)
        for key in _different(script.text, reading, launches, settings or {}):
            script.persons.append(
                f"{key}: the new script would not give the value that was meant: write it by hand."
            )
    script.persons += [] if script.persons else _still_there(script.text, reading, settings or {})
    script.persons += dict.fromkeys(
        sentence for each in launches if (sentence := each.missing_config())
    )
    script.notes += kept_fixed(reading, launches, settings or {}, options=options, folder=folder)
    script.persons += decisions
    outcome = worst([each.translation.outcome for each in launches])
    if not_read:
        outcome = worst([outcome, Outcome.PINNED])
    return Migration(
        reading=reading,
        launches=tuple(launches),
        script=script,
        outcome=Outcome.PERSON if script.persons else outcome,
        unfollowed=tuple(decisions),
        not_read=tuple(not_read),
    )


def _translated(
    launches: Sequence[Launch],
    options: Options,
    folder: Path | None,
    *,
    literal_keys: frozenset[str] = frozenset(),
) -> list[TranslatedLaunch]:
    """Return each launch's translation; the same launch in a loop is translated once."""
    done: dict[tuple[object, ...], TranslatedLaunch] = {}
    out = []
    for launch in launches:
        words = tuple(
            (override.text.shown(), override.source, override.at) for override in launch.overrides
        )
        given = tuple((name, text.shown()) for name, text in launch.processes.items())
        same = (launch.entry, launch.config_name, launch.config_path, given, words)
        if same not in done:
            done[same] = translate_launch(launch, options, folder=folder, literal_keys=literal_keys)
        out.append(replace(done[same], launch=launch))
    return out


def _still_there(text: str, reading: ScriptReading, settings: dict[str, str]) -> list[str]:
    """Find old trainers that the new script starts, or can start in another branch."""
    known = {launch.span.start for launch in reading.launches}
    others = [launch for other in reading.alternatives for launch in other.launches]
    result = {
        reading.line_of(at): entry
        for at, entry in ((other.span.start, other.entry) for other in others)
        if at not in known
    }
    if not result:
        lines = {text.count("\n", 0, at) + 1: entry for at, entry in left_behind(parse(text))}
        return [
            f"line {line} of the new script still names {entry}{_OTHERWISE}"
            for line, entry in lines.items()
        ] or [
            f"the new script would still start {launch.entry}: write that command by hand."
            for launch in find_launches(reread(text, reading, settings))
        ]
    return [
        f"line {line}: {entry} is started there where a condition turns out otherwise{_OTHERWISE}"
        for line, entry in sorted(result.items())
    ]


_OTHERWISE = (
    ", and still stands as it was: translate the script with that branch chosen (--set), and take "
    "the command from there."
)


def _different(
    text: str, reading: ScriptReading, launches: list[TranslatedLaunch], settings: dict[str, str]
) -> list[str]:
    """Find keys that the new script, read like the old one, sets to other values."""
    # The new script is read in the same way, so that quoting mistakes of the rewriting show as
    # other values.
    events = [
        event
        for event in reread(text, reading, settings)
        if any(field.text.known == COMMAND for field in event.fields)
    ]
    written = [each for each in launches if each.is_writable and not each.launch.is_inner]
    out: list[str] = []
    # Lengths differ if the new script starts fewer commands, which `_still_there` reports.
    for event, each in zip(events, written, strict=False):
        position = next(
            number for number, field in enumerate(event.fields) if field.text.known == COMMAND
        )
        result = {
            shown.partition("=")[0]: shown
            for field in event.fields[position + 1 :]
            if "=" in (shown := field.text.shown())
        }
        out += [
            argument.key
            for argument in each.arguments
            if result.get(argument.key) != argument.text.shown()
        ]
    return list(dict.fromkeys(out))


_OPPOSITE = {"true": "False", "false": "True"}
_OTHER = "37"
"""A value that no default is, fit for a number and for a name."""
_MOST_VALUES = 4
_ARGUMENT = re.compile(r"\$\{([1-9])(?::?[-=])")


def kept_fixed(
    reading: ScriptReading,
    launches: Sequence[TranslatedLaunch],
    settings: dict[str, str],
    *,
    options: Options,
    folder: Path | None,
) -> list[str]:
    """Describe variables with a default whose other values would change the new command.

    Args:
        reading: of the old script.
        launches: the launches with translations.
        settings: variables the user set; they stay fixed.
        options: of the translation.
        folder: of the script.
    """
    names = {name for name, is_bare in reading.free.items() if not is_bare} | set(
        _ARGUMENT.findall(reading.text)
    )
    defaults = _defaults_of_options(reading)
    out = []
    for name in sorted((names | defaults.keys()) - settings.keys()):
        span = defaults.get(name) if name not in names else None
        keys: dict[str, None] = {}
        missing: dict[str, str] = {}
        for value in _values(reading.text, name, span):
            given = {**settings, name: value} if span is None else settings
            replaced = {} if span is None else {span.start: value}
            for launch, each in zip(_launched(reading, given, replaced), launches, strict=False):
                keys.update(dict.fromkeys(_fixed(launch, each, value)))
                if _has_dropped_switch(launch, each):
                    result = translate_launch(launch, options, folder=folder).translation
                    missing = {**dict.fromkeys(_added(result, each), value), **missing}
        if span is None:
            again = f"translate again with --set {name}=VALUE"
        else:
            again = f"change its default in line {reading.line_of(span.start)}, and translate again"
        if missing and not keys:
            value = next(iter(missing.values()))
            out.append(
                f"{name} switches nothing on by its default, so the new command does not have it: "
                f"a value such as {name}={value} would set {_shorten(list(missing))}; {again} to "
                "use it."
            )
        if keys:
            what = f"argument {name}" if name.isdigit() else name
            if span is not None:
                what += ", which an option of the script changes,"
            out.append(
                f"{what} has a default in the script, from which {_shorten(list(keys))} came: with "
                f"another value they would stay as they are written; {again}."
            )
    return out


def _shorten(keys: list[str]) -> str:
    return ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")


def _defaults_of_options(reading: ScriptReading) -> dict[str, Span]:
    """Return the assignments of variables that loops over the script's arguments assign again."""
    nodes = list(walk(reading.program))
    changed = {
        inner.span.start: inner.name
        for node in nodes
        if isinstance(node, Loop | For) and _reads_arguments(node, reading.text)
        for inner in walk(node)
        if isinstance(inner, Assignment)
    }
    return {
        node.name: node.span
        for node in nodes
        if isinstance(node, Assignment)
        and node.name in changed.values()
        and isinstance(node.value, Word)
        and node.span.start in reading.executed - changed.keys()
    }


def _reads_arguments(loop: Loop | For, text: str) -> bool:
    """Check if a loop goes through the script's arguments."""
    if isinstance(loop, For) and loop.words is None:
        return True
    head = text[loop.span.start : loop.body.items[0].span.start] if loop.body.items else ""
    return re.search(r"\$[#@*1]|\$\{[#@*1]|\bgetopts\b", head) is not None


def _values(text: str, name: str, span: Span | None) -> list[str]:
    """Return another value, and those that the script compares the variable with."""
    if span is None:
        match = re.search(rf"\$\{{{name}:?[-=]([^}}]*)\}}", text)
        default = match[1] if match else ""
    else:
        default = text[span.start : span.end].partition("=")[2]
    other = _OPPOSITE.get(default.strip("\"'").lower(), _OTHER)
    spelled = rf"\$\{{?{name}\b[^}}\s]*\}}?"
    result = re.findall(
        rf"{spelled}\"?\s*(?:==?|!=|-eq|-ne|-gt|-ge|-lt|-le)\s*[\"']?([\w.-]+)", text
    )
    for body in re.findall(rf"\bcase\s+\"?{spelled}\"?\s+in\b(.*?)\besac\b", text, re.DOTALL):
        result += re.findall(r"^\s*\(?[\"']?([\w.-]+)[^)\n]*\)", body, re.MULTILINE)
    return [other, *dict.fromkeys(result)][: 1 + _MOST_VALUES]


def _launched(
    reading: ScriptReading, settings: dict[str, str], replaced: dict[int, str]
) -> list[Launch]:
    try:
        return find_launches(reread(reading.text, reading, settings, replaced))
    except ScriptError:
        return []


def _texts(launch: Launch) -> dict[str, str]:
    return {override.key: override.text.shown() for override in launch.overrides if override.key}


def _has_dropped_switch(launch: Launch, each: TranslatedLaunch) -> bool:
    """Check if another value of a variable adds a setting, or changes one without a successor."""
    before, after = _texts(each.launch), _texts(launch)
    changed = [key for key, shown in after.items() if before.get(key, shown) != shown]
    return bool(after.keys() - before.keys()) or any(
        not any(key in setting.old_keys for setting in each.translation.settings) for key in changed
    )


def _fixed(launch: Launch, each: TranslatedLaunch, value: str) -> Iterator[str]:
    """Yield fixed new keys that would differ with another value of the variable."""
    before = _texts(each.launch)
    after = {key: shown for key, shown in _texts(launch).items() if shown != value}
    changed = {key for key in before if before[key] != after.get(key)}
    by_key = {
        key: number
        for number, override in enumerate(each.launch.overrides)
        if (key := override.key)
    }
    for argument, setting in zip(each.arguments, each.translation.settings, strict=True):
        numbers = {by_key[key] for key in changed} & set(setting.sources)
        # A text of the script follows its variables, unless the override may be absent.
        follows = _follows(argument) and not any(
            by_key[key] in numbers for key in before.keys() - after.keys()
        )
        if not follows and not _is_kind_of_data(argument.key) and numbers:
            yield argument.key


def _follows(argument: NewArgument) -> bool:
    return any(piece.source is not None for piece in argument.text.pieces)


def _is_kind_of_data(key: str) -> bool:
    """Check for parquet or jsonl, which other values of a path change; the loader would say so."""
    return key.startswith("data.") and key.endswith(".name")


def _added(other: Translation, each: TranslatedLaunch) -> list[str]:
    """Return keys that a translation with another value of a variable sets, and this one does not.

    Keys of a fork are among them, since they have no successor.
    """
    written = {setting.override for setting in each.translation.settings}
    following = {argument.key for argument in each.arguments if _follows(argument)}
    known = {token.key for token in each.translation.tokens if token.disposition == "unmapped"}
    return [
        setting.key
        for setting in other.settings
        if setting.override not in written
        and setting.key not in following
        and not _is_kind_of_data(setting.key)
    ] + [
        token.key
        for token in other.tokens
        if token.disposition == "unmapped" and token.key not in known
    ]
