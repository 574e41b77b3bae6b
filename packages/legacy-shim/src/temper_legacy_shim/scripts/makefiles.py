"""Read a makefile's rules as bash, except conditionals, includes and functions."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Names of the files that make looks for, in its order."""

_ASSIGNMENT = re.compile(r"(?:export\s+|override\s+)?([\w.-]+)\s*(?::{0,3}|\?|\+)=\s*(.*)")
_RULE = re.compile(r"([^\s:=#][^:=#]*)::?(?!=)\s*([^;=]*?)\s*(?:;\s*(.*))?")
_REFERENCE = re.compile(r"\$(?:\(([\w.-]+)\)|\{([\w.-]+)\}|([@<^$]))")
_WITH_VALUE = frozenset(("-j", "-l", "-o", "-W", "-I"))
"""Options of make whose value may be the next word."""
_MOST_NESTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeCall:
    """The arguments of a ``make`` command."""

    file: str | None
    folder: str
    """Folder given with -C; empty for the working directory."""
    targets: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    line: int
    prerequisites: tuple[str, ...]
    commands: tuple[str, ...]
    """Lines without their tabulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Makefile:
    """Rules by target, and variables; the last assignment counts."""

    rules: dict[str, Rule]
    variables: dict[str, str]

    def default_target(self) -> str:
        """Return the target of ``make`` without arguments; empty if there is none."""
        return next((name for name in self.rules if not name.startswith(".")), "")

    def write_commands(self, target: str, *, variables: dict[str, str]) -> str:
        """Return the commands of a target and of what it depends on, as a bash script.

        Args:
            target: Name of the target.
            variables: Variables of the command line, which replace those of the file.
        """
        known = self.variables | variables
        lines: list[str] = []
        for name in self._iterate_needed(target, seen=set()):
            rule = self.rules[name]
            own = {
                "@": name,
                "<": " ".join(rule.prerequisites[:1]),
                "^": " ".join(rule.prerequisites),
            }
            # @ hides a line, - ignores its error, + runs it even with -n.
            lines += [_expand(line.lstrip("@-+ \t"), known | own) for line in rule.commands]
        return "\n".join(lines) + "\n"

    def _iterate_needed(self, target: str, *, seen: set[str]) -> Iterator[str]:
        """Yield the targets with rules that make would bring up to date, prerequisites first."""
        if target in seen or target not in self.rules:
            return
        seen.add(target)
        for name in self.rules[target].prerequisites:
            yield from self._iterate_needed(name, seen=seen)
        yield target


def parse_make_call(words: Sequence[str]) -> MakeCall | None:
    """Return the arguments of a command if it runs make, else None."""
    if not words or words[0].rpartition("/")[2] not in ("make", "gmake"):
        return None
    file, folder, targets, variables = None, "", list[str](), dict[str, str]()
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        name, separator, value = word.partition("=")
        if word in ("-f", "--file", "--makefile") and rest:
            file = rest.pop(0)
        elif word in ("-C", "--directory") and rest:
            folder = rest.pop(0)
        elif name in ("--file", "--makefile") and separator:
            file = value
        elif name == "--directory" and separator:
            folder = value
        elif word in _WITH_VALUE and rest and rest[0].isdigit():
            rest.pop(0)
        elif not word.startswith("-") and separator:
            variables[name] = value
        elif not word.startswith("-"):
            targets.append(word)
    return MakeCall(file=file, folder=folder, targets=tuple(targets), variables=variables)


def read_makefile(path: Path) -> Makefile:
    rules: dict[str, Rule] = {}
    variables: dict[str, str] = {}
    current: list[str] = []
    for number, line in _iterate_lines(path):
        if line.startswith("\t"):
            for target in current:
                rule = rules[target]
                rules[target] = Rule(
                    line=rule.line,
                    prerequisites=rule.prerequisites,
                    commands=(*rule.commands, line[1:]),
                )
        elif assigned := _ASSIGNMENT.fullmatch(line.strip()):
            variables[assigned[1]] = assigned[2]
        elif header := _RULE.fullmatch(line.rstrip()):
            current = _expand(header[1], variables).split()
            needed = tuple(name for name in _expand(header[2], variables).split() if name != "|")
            for target in current:
                earlier = rules.get(target, Rule(line=number, prerequisites=(), commands=()))
                rules[target] = Rule(
                    line=number,
                    prerequisites=(*earlier.prerequisites, *needed),
                    commands=(*earlier.commands, *filter(None, [header[3]])),
                )
    return Makefile(rules=rules, variables=variables)


def _iterate_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, continued ones joined, without comments outside commands."""
    start, joined = 0, ""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), 1):
        start = start if joined else number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        is_command = joined.startswith("\t")
        yield start, joined if is_command else re.sub(r"(?:^|\s)#.*", "", joined)
        joined = ""


def _expand(text: str, variables: dict[str, str]) -> str:
    """Replace references to known variables; others stay, as variables of the environment."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[3]
        return variables.get(name, match[0] if match[3] else f"${{{name}}}")

    # Two dollar signs are one of bash, and begin no reference.
    parts = text.split("$$")
    for position, part in enumerate(parts):
        for _ in range(_MOST_NESTED):
            expanded = _REFERENCE.sub(replace, part)
            if expanded == part:
                break
            part = expanded
        parts[position] = part
    return "$".join(parts)
