"""Rewrite a script: replace the launches, and keep everything else."""

from dataclasses import dataclass, field

from temper_legacy_shim.bash.syntax.parser import parse
from temper_legacy_shim.bash.syntax.syntax_tree import Span
from temper_legacy_shim.scripts.dead_arrays import DeadArray, find_dead_arrays
from temper_legacy_shim.scripts.launch_translation import NewArgument, TranslatedLaunch
from temper_legacy_shim.scripts.launches import Launch
from temper_legacy_shim.scripts.script_reading import ScriptReading

COMMAND = "temper-train"
_DROPPED = ("dropped", "ignored", "superseded", "unmapped")
_HEADS = {"person": "DECIDE", "hazard": "differs"}


@dataclass(slots=True)
class NewScript:
    text: str
    notes: list[str] = field(default_factory=list)
    persons: list[str] = field(default_factory=list)
    """Commands that could not be written."""


@dataclass(frozen=True, slots=True)
class _Edit:
    span: Span
    text: str


def rewrite(reading: ScriptReading, translated: list[TranslatedLaunch]) -> NewScript:
    """Replace every launch that has a translation.

    Args:
        reading: the old script.
        translated: its launches, in order.
    """
    out = NewScript(reading.text)
    edits: list[_Edit] = []
    rewritten: list[Span] = []
    kept: list[str] = []
    # One array per command site; a script may start several trainers.
    names = _Names(reading.text)
    for span, launches in _group_by_site(translated).items():
        problem = _problem(launches)
        line = reading.text.count("\n", 0, span.start) + 1
        if problem:
            out.persons.append(f"line {line}: {problem}")
            edits.append(
                _Edit(
                    Span(span.start, span.start),
                    _left_unchanged(reading.text, launches[0], problem),
                )
            )
            continue
        edits += (replacement := _replacement(reading.text, launches[0], name=next(names)))
        rewritten.append(_from_starter(launches[0].launch))
        # The replacement may still read variables of the script, whose assignments must stay.
        kept += [edit.text for edit in replacement]
    tokens = {
        override.at for each in translated for override in each.launch.overrides if override.at >= 0
    }
    dead = (
        find_dead_arrays(
            parse(reading.text),
            reading.text,
            rewritten=rewritten,
            tokens=tokens,
            executed=reading.executed,
            # Comments cite old tokens, and must not keep the arrays of these alive.
            kept=_strip_comments(kept),
        )
        if rewritten
        else []
    )
    for array in dead:
        edits.append(_commented(reading.text, array))
        if not array.is_executed:
            shown = ", ".join(element.word.source for element in array.elements[:4]) + (
                " ..." if len(array.elements) > 4 else ""
            )
            what = (
                "stand in a branch that was not taken, where the new script stops: translate that "
                "branch by giving its variable with --set"
            )
            out.notes.append(f"line {reading.line_of(array.span.start)}: {shown} {what}.")
    out.text = _applied(reading.text, edits)
    return out


def _group_by_site(translated: list[TranslatedLaunch]) -> dict[Span, list[TranslatedLaunch]]:
    """Return launches by the command that starts them, several in a loop or function."""
    out: dict[Span, list[TranslatedLaunch]] = {}
    for each in translated:
        out.setdefault(each.launch.item if each.launch.is_inner else each.launch.span, []).append(
            each
        )
    return out


def _problem(launches: list[TranslatedLaunch]) -> str:
    """Return why a command cannot be rewritten; empty if it can."""
    first = launches[0]
    if first.launch.sourced_file:
        return (
            f"the launch is in {first.launch.sourced_file}, which this script sources: put the new "
            "command there by hand."
        )
    if first.launch.is_inner:
        return (
            "the launch is in a text that another shell runs (bash -c, eval, a heredoc): "
            "put the new command there by hand."
        )
    if not first.is_writable:
        return (
            f"{first.launch.entry} has no counterpart that could be launched: the report says why."
        )
    written = [
        [(argument.key, argument.source) for argument in each.arguments] for each in launches
    ]
    # Copied values keep their variables, so only computed ones can differ between rounds.
    different = [
        key for one in written[1:] for key in sorted({key for key, _ in set(one) ^ set(written[0])})
    ]
    if different:
        keys = ", ".join(dict.fromkeys(different))
        return (
            f"the command runs {len(launches)} times, with values of {keys} that were computed "
            "and differ: write one command for each."
        )
    return ""


class _Names:
    """Names of arrays the script does not use."""

    def __init__(self, text: str) -> None:
        self._text, self._number = text, 0

    def __next__(self) -> str:
        while True:
            self._number += 1
            name = "temper_overrides" + (f"_{self._number}" if self._number > 1 else "")
            # Any mention counts, also in a text that another shell may run.
            if name not in self._text:
                return name


def _replacement(text: str, each: TranslatedLaunch, *, name: str) -> list[_Edit]:
    """Return the array before the command's line, and the command."""
    launch = each.launch
    indent = _indent(text, launch.item.start)
    # Arguments go into an array, because a continued command has no place for comments.
    array = "\n".join(indent + line if line else "" for line in _array(text, each, name)).lstrip()
    command = " ".join(
        [
            *_wrappers(text, launch),
            COMMAND,
            f'"${{{name}[@]}}"',
            *(argument.source for argument in launch.open_arguments),
        ]
    )
    return [
        _Edit(Span(launch.item.start, launch.item.start), f"{array}\n{indent}"),
        _Edit(launch.arguments, command),
    ]


def _indent(text: str, at: int) -> str:
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before[: len(before) - len(before.lstrip())]


def _wrappers(text: str, launch: Launch) -> list[str]:
    """Return the text before the launcher, such as ``srun ...``, unchanged."""
    # No srun, ray or nohup before Python.
    if launch.starter == 0:
        return []
    start = launch.command[launch.starter].at
    if launch.arguments.start <= start <= launch.arguments.end:
        return [text[launch.arguments.start : start].rstrip().removesuffix("\\").rstrip()]
    # The wrapper comes from a variable, so the command's own text does not contain it.
    return [field.source for field in launch.command[: launch.starter]]


def _from_starter(launch: Launch) -> Span:
    """Find the span from the Python launcher to the last argument, without wrappers."""
    start = launch.command[launch.starter].at
    is_inside = launch.arguments.start <= start <= launch.arguments.end
    return Span(start, launch.arguments.end) if is_inside else launch.arguments


def _strip_comments(texts: list[str]) -> str:
    return "\n".join(
        line.partition("  # ")[0]
        for text in texts
        for line in text.splitlines()
        if not line.lstrip().startswith("#")
    )


def _array(text: str, each: TranslatedLaunch, name: str) -> list[str]:
    source = each.translation.source
    release = source.version if source.is_given else f"{source.version} (inferred)"
    head = (
        f"# {each.launch.entry} of {release}, by temper-migrate; what became of every key is in "
        "its report."
    )
    lines = [head, *_findings(each), f"{name}=("]
    # A token that sets several new keys keeps its comments at the first of them only.
    seen: set[int] = set()
    requested = [
        argument
        for argument, setting in zip(each.arguments, each.translation.settings, strict=True)
        if not setting.is_pinned
    ]
    pinned = [argument for argument in each.arguments if argument not in requested]
    for argument in requested:
        lines += _lines(text, each, argument, seen)
    if pinned:
        lines += ["", "    # Defaults of the old release that differ from Temper's:"]
        for argument in pinned:
            lines += _lines(text, each, argument, seen)
    lines += _dropped_lines(text, each, seen)
    return [*lines, ")"]


def _findings(each: TranslatedLaunch) -> list[str]:
    """Return decisions and differences as comments; unknown keys have a line below."""
    result = [
        finding
        for finding in each.translation.findings
        if finding.level in _HEADS and finding.rule != "unmapped"
    ]
    return [
        f"# {_HEADS[finding.level]}: {' '.join(each.readable(finding.message).split())}"
        for finding in result
    ]


def _lines(text: str, each: TranslatedLaunch, argument: NewArgument, seen: set[int]) -> list[str]:
    """Return one argument with the comments of the token it comes from."""
    above, extra = [], argument.comment
    if argument.at >= 0 and argument.at not in seen:
        seen.add(argument.at)
        source = next(
            (override.source for override in each.launch.overrides if override.at == argument.at),
            "",
        )
        comments = comments_at(text, argument.at, len(source))
        above = [f"    {line}" for line in comments.above]
        extra = "; ".join(part for part in (comments.extra.lstrip("# "), extra) if part)
    extra = " ".join(each.readable(extra).split())
    return [*above, f"    {argument.source}" + (f"  # {extra}" if extra else "")]


def _dropped_lines(text: str, each: TranslatedLaunch, seen: set[int]) -> list[str]:
    """Return the old tokens that have no successor, with their comments, as comments."""
    out = []
    own = each.own_config.name if each.own_config is not None else ""
    for token in each.translation.tokens:
        if (
            token.disposition not in _DROPPED
            or token.new_keys
            or token.index >= len(each.launch.overrides)
        ):
            continue
        reason = " ".join(each.readable(token.reason).split())
        if token.index < 0:
            out.append(f"    # {token.text} ({own}): {token.disposition}. {reason}".rstrip())
            continue
        override = each.launch.overrides[token.index]
        comments = (
            comments_at(text, override.at, len(override.source))
            if override.at >= 0 and override.at not in seen
            else None
        )
        out += [f"    {line}" for line in comments.above] if comments else []
        kept = f" ({comments.extra.lstrip('# ')})" if comments and comments.extra else ""
        out.append(
            f"    # {' '.join(override.source.split())}{kept}: "
            f"{token.disposition}. {reason}".rstrip()
        )
    return ["", "    # Without a successor:", *out] if out else []


def _left_unchanged(text: str, each: TranslatedLaunch, problem: str) -> str:
    """Return the comment above a launch for a person, with the new command if any."""
    indent = _indent(text, each.launch.item.start)
    lines = [f"# temper-migrate: needs a person: {problem}"]
    if each.is_writable:
        lines += [
            f"# {COMMAND} \\",
            *(f"#     {argument.source} \\" for argument in each.arguments),
        ]
        lines[-1] = lines[-1].removesuffix(" \\")
    return (
        f"\n{indent}".join(line for block in lines for line in block.splitlines()) + f"\n{indent}"
    )


_STOP = (
    "{ echo 'temper-migrate: this branch was not translated; choose it with --set and translate "
    "again.' >&2; exit 1; }"
)


def _commented(text: str, array: DeadArray) -> _Edit:
    """Comment an array out, with a command where a body could become empty."""
    # A branch that was not taken stops the script.
    indent = _indent(text, array.span.start)
    command = ":" if array.is_executed else _STOP
    # Comments would swallow the rest of the line.
    if not array.is_own_line:
        return _Edit(array.span, command)
    lines = text[array.span.start : array.span.end].split("\n")
    head = (
        f"# Old overrides, in {COMMAND}'s words below:" if array.is_executed else "# Old overrides:"
    )
    shown = [
        (f"{indent}# {line}" if number else f"# {line}").rstrip()
        for number, line in enumerate(lines)
    ]
    first = f"{command}  {head}" if array.is_single or not array.is_executed else head
    return _Edit(array.span, f"{first}\n{indent}" + "\n".join(shown))


def _applied(text: str, edits: list[_Edit]) -> str:
    # From the end of the text, so that the positions of earlier edits stay valid.
    for edit in sorted(edits, key=lambda edit: (edit.span.start, edit.span.end), reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


@dataclass(frozen=True, slots=True)
class Comments:
    above: tuple[str, ...]
    """Whole lines, without indentation."""
    extra: str
    """The comment after the token on the same line, or empty."""


def comments_at(text: str, start: int, length: int) -> Comments:
    """Return the comment lines above the token at `start`, and the comment on its line."""
    line_start = text.rfind("\n", 0, start) + 1
    above: list[str] = []
    if not text[line_start:start].strip():
        end = line_start - 1
        # Comment lines directly above the token belong to it, as in the old array.
        while end > 0:
            begin = text.rfind("\n", 0, end) + 1
            line = text[begin:end].strip()
            if not line.startswith("#") or line.startswith("#!"):
                break
            above.insert(0, line)
            end = begin - 1
    line_end = text.find("\n", start)
    rest = text[start + length : len(text) if line_end < 0 else line_end].strip()
    return Comments(tuple(above), rest if rest.startswith("#") else "")
