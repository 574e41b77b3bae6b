"""Find files a script names in any word, also in quoted text and in branches not taken."""

import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from temper_legacy_shim.bash.execution.external_commands import WRAPPERS
from temper_legacy_shim.bash.syntax.syntax_tree import (
    Literal,
    Parameter,
    Pipeline,
    Simple,
    Span,
    Word,
    children,
)
from temper_legacy_shim.bash.values.expansion import expand
from temper_legacy_shim.errors import ScriptError
from temper_legacy_shim.scripts.script_reading import (
    ScriptReading,
    find_folders,
    find_script,
    is_regular,
    known_end,
    read_bounded,
)

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_EXPANSION = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+|[)`}](?=/)")
"""Expansions, and the end of one before the rest of a path."""
_BETWEEN = re.compile(r"[\s;|&<>()=,\[\]{}:]+")
_SUFFIX = re.compile(r".*\.(?:sh|bash|slurm|sbatch)")
_CALL = re.compile(
    r"(?<![\w.$-])(?:bash|sh|zsh|dash|source|\.|sbatch|qsub|bsub)\s+(?:-\S+\s+)*([^\s;|&<>()]+)"
)
_ENVIRONMENT = re.compile(r"(?:^|/)(?:activate|conda\.sh|\.?\w*profile|\.?\w*bashrc)$")
_PRINTS = ("echo", "printf", "cat")
_PATTERN = re.compile(r"(?:[\w-][\w.-]*/){0,4}(?=[*?]*[\w-])[\w*?.-]+\.(?:sh|bash|slurm|sbatch)")
"""Names with an unknown part, in folders that are known; ``*.sh`` is no name."""
_MOST_FILES = 20
"""Files that one pattern may stand for."""


def find_named_files(reading: ScriptReading, folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield position, name and path of each script that is there; launches are left out.

    A name with an unknown part, such as ``train_$X.sh``, stands for all files that fit.
    """
    known = [launch.span for launch in (*reading.launches, *reading.written)]
    seen: set[str] = set()
    folders = find_folders(folder, reading.folders)
    for word, _ in _words(reading):
        if any(span.start <= word.span.start < span.end for span in known):
            continue
        tokens = (each for token in _plain(word.source).split() for each in _expand_braces(token))
        for name in (name for token in tokens for name in _BETWEEN.split(token) if name):
            if name in seen:
                continue
            seen.add(name)
            for path in _files(name, folders):
                text = read_bounded(path)
                # A script may copy itself, and imported modules start nothing.
                if text is not None and text != reading.text and _is_program(path, text):
                    yield word.span.start, name.rpartition("$/")[2], path


def find_unknown_calls(reading: ScriptReading, folder: Path) -> Iterator[tuple[int, str]]:
    """Yield position and text of calls of scripts that are not there, or whose name is unknown.

    They are called in quoted text, by an unknown program, in branches not taken, or in loops whose
    rounds only a run knows. Other calls are events of the reading.
    """
    for word, command in _words(reading):
        start, text = word.span.start, word.source
        if command is not None and word is next(iter(command.words), None):
            text = reading.text[command.span.start : command.span.end]
            is_event = _CALL.match(f"{text} ") or word.source.rpartition("/")[2] in WRAPPERS
            if is_event and command.span.start in reading.executed:
                continue
        elif not re.search(r"\s", text):
            continue
        calls = (each for call in _CALL.finditer(_plain(text)) for each in _expand_braces(call[1]))
        for called in calls:
            last = called.rpartition("/")[2]
            is_open = re.search(r"[$*]", last) is not None
            is_file = _SUFFIX.fullmatch(last) and not _ENVIRONMENT.search(called)
            if is_open or (is_file and find_script(called, folder, reading.folders) is None):
                yield start, textwrap.shorten(text, 60, placeholder=" ...")


def _plain(source: str) -> str:
    """Return text without comments and quotes, with a dollar sign for each expansion."""
    # A backslash may begin \n in a text, or escape a quote.
    text = _COMMENT.sub("", source).replace("\\", " ")
    return _EXPANSION.sub("$", re.sub(r"[\"']", "", text))


def _expand_braces(token: str) -> list[str]:
    """Return the words the braces of a token stand for; the token if they are too many."""
    word = Word((Literal(token, is_quoted=False),), token, Span(0, len(token)))
    try:
        return [each.literal() or "" for each in expand(word)]
    except ScriptError:
        return [token]


def _files(name: str, folders: list[Path]) -> Iterator[Path]:
    """Yield the first file of this name, or all that fit a name with an unknown part."""
    if not re.search(r"[$*?]", name.rpartition("/")[2]):
        end, is_known = known_end(name)
        is_absolute = end.startswith("/") and is_known
        # Any word may be the name of a file without a suffix, but most are none.
        near = folders if re.search(r"[./]", name) else folders[:1]
        paths = [Path(end)] if is_absolute else [each / end for each in near if end]
        yield from itertools.islice(filter(is_regular, paths), 1)
    elif _PATTERN.fullmatch(pattern := re.sub(r"[$*]+", "*", name.rpartition("$/")[2])):
        matches = (sorted(each.glob(pattern)) for each in folders)
        yield from itertools.islice(itertools.chain.from_iterable(matches), _MOST_FILES)


def _is_program(path: Path, text: str) -> bool:
    if path.suffix == ".py":
        return "__main__" in text
    return not path.suffix or text.startswith("#!") or _SUFFIX.fullmatch(path.name) is not None


def _words(reading: ScriptReading) -> Iterator[tuple[Word, Simple | None]]:
    """Yield all words with their command, without those that are only printed."""
    left: list[tuple[object, Simple | None]] = [(reading.program, None)]
    while left:
        node, command = left.pop()
        if isinstance(node, Word):
            yield node, command
        if _is_printed(node):
            continue
        command = node if isinstance(node, Simple) else command
        left += [(each, command) for each in children(node)]


def _is_printed(node: object) -> bool:
    """Check for text that goes to the terminal: of echo, or of an error such as ``${X:?text}``."""
    if isinstance(node, Parameter):
        return node.operator.endswith("?")
    command = node.commands[0] if isinstance(node, Pipeline) and len(node.commands) == 1 else None
    return (
        isinstance(command, Simple)
        and all(redirect.operator in (">&", "<<", "<<-", "<<<") for redirect in command.redirects)
        and any(isinstance(word, Word) and word.literal() in _PRINTS for word in command.words[:1])
    )
