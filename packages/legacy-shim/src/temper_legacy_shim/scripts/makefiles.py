"""Read a makefile's rules as bash, in all branches; of make's functions only `call` is followed."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from temper_legacy_shim.scripts.script_reading import is_regular, read_bounded

MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Names of the files that make looks for, in its order."""

_ASSIGNMENT = re.compile(r"(?:(?:export|override|private)\s+)*([\w.-]+)\s*(:{0,3}|\?|\+)=\s*(.*)")
_OF_TARGET = re.compile(r"[^:=#]+::?\s+([\w.-]+\s*(?:\?|\+|:{0,3})=.*)")
_DEFINITION = re.compile(r"define\s+([\w.-]+)\s*(:{0,3}|\?|\+)=?")
_REFERENCE = re.compile(r"\$(?:\(([\w.-]+)\)|\{([\w.-]+)\}|([@<^0-9]|\$))")
_FUNCTION = re.compile(r"(?<!\$)\$[({]((?!call\b)[a-z][a-z-]*)[ \t]")
_CALL = re.compile(r"(?<!\$)\$([({])call[ \t]+")
_WITH_VALUE = frozenset(("-j", "-l", "-o", "-W", "-I"))
"""Options of make whose value may be the next word."""
_MOST_CHARACTERS = 100_000
"""Length of one expanded text."""
_MOST_REFERENCES = 200_000
"""Number of references to variables that are followed in one makefile."""
_MOST_IN_TEXT = 2_000
"""Number of references that one text leads to."""
_MOST_LEVELS = 50
"""Number of variables that refer to each other in a chain."""
_MOST_IN_FILE = 500_000
"""Length of a makefile."""
_MOST_FILES = 100
_MOST_REMARKS = 5


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


@dataclass(slots=True)
class _Budget:
    """References to variables that may still be followed."""

    references: int = _MOST_REFERENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Makefile:
    """Rules by target, and variables as text that is expanded where it is used."""

    path: Path
    rules: dict[str, Rule]
    variables: dict[str, str]
    remarks: tuple[str, ...] = ()
    """Sentences about parts that were not read."""
    budget: _Budget = field(default_factory=_Budget)

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
        for name in self._find_needed(target):
            rule = self.rules[name]
            own = {
                "@": name,
                "<": " ".join(rule.prerequisites[:1]),
                "^": " ".join(rule.prerequisites),
            }
            # @ hides a line, - ignores its error, + runs it even with -n.
            text = "\n".join(_expand(line, known | own, self.budget) for line in rule.commands)
            lines += [line.lstrip("@-+ \t") for line in text.split("\n")]
        return "\n".join(lines) + "\n"

    def find_gaps(self, target: str, folder: Path) -> list[str]:
        """Return sentences about parts of a target's commands that are not known.

        Args:
            target: Name of the target.
            folder: Folder of the script that calls make.
        """
        out = list(self.remarks)
        folders = (self.path.parent, folder)
        for name in self._find_needed(target):
            rule = self.rules[name]
            missing = [
                each
                for each in rule.prerequisites
                if each not in self.rules and not any(os.path.lexists(f / each) for f in folders)
            ]
            if functions := ", ".join(dict.fromkeys(_FUNCTION.findall("\n".join(rule.commands)))):
                out.append(
                    f"the rule {name} of {self.path.name} uses functions of make ({functions}), "
                    "which were not evaluated"
                )
            if missing:
                out.append(
                    f"the rule {name} of {self.path.name} needs {' '.join(missing)[:80]}, for "
                    "which no rule or file was found"
                )
        return out[:_MOST_REMARKS]

    def _find_needed(self, target: str) -> list[str]:
        """Return the targets with rules that make would bring up to date, prerequisites first."""
        out, seen = list[str](), set[str]()
        # Generated makefiles have chains that are too long for recursion.
        waiting = [(target, False)]
        while waiting:
            name, has_prerequisites = waiting.pop()
            if has_prerequisites:
                out.append(name)
            elif name in self.rules and name not in seen:
                seen.add(name)
                needed = reversed(self.rules[name].prerequisites)
                waiting += [(name, True), *((each, False) for each in needed)]
        return out


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
    lines: dict[str, int] = {}
    needed: dict[str, list[str]] = {}
    commands: dict[str, list[str]] = {}
    variables = _Variables()
    remarks: dict[str, None] = {}
    current: list[str] = []
    for number, line in _iterate_lines(path, path.parent, variables, remarks, seen=set()):
        if variables.takes(line):
            continue
        if re.match(r"\$[({](?:eval|foreach|call)\s", line):
            shown = " ".join(line.split()[:2])
            remarks[f"{path.name} makes rules with a function ({shown} ...): not evaluated"] = None
            continue
        if line.startswith("\t"):
            for target in current:
                commands[target].append(line[1:])
        elif header := _parse_rule(line.rstrip()):
            current, prerequisites = (variables.expand(each).split() for each in header[:2])
            for target in current:
                lines[target] = number
                needed.setdefault(target, []).extend(p for p in prerequisites if p != "|")
                commands.setdefault(target, []).extend(filter(None, header[2:]))
    rules = {
        target: Rule(
            line=number, prerequisites=tuple(needed[target]), commands=tuple(commands[target])
        )
        for target, number in lines.items()
    }
    return Makefile(
        path=path,
        rules=rules,
        variables=variables.texts,
        remarks=tuple(remarks),
        budget=variables.budget,
    )


def _parse_rule(line: str) -> tuple[str, str, str] | None:
    """Return the targets, prerequisites and first command of a rule; None for other lines."""
    targets, colon, rest = line.partition(":")
    needed, _, command = rest.removeprefix(":").partition(";")
    is_rule = colon and targets.strip() and not targets[0].isspace() and "=" not in needed
    return (targets, needed, command.strip()) if is_rule and not set("=#") & set(targets) else None


class _Variables:
    """The variables of a makefile so far."""

    def __init__(self) -> None:
        self.texts = {"MAKE": "make"}
        self.budget = _Budget()
        self._depth = 0
        self._defined: tuple[str, str] | None = None
        self._body: list[str] = []

    def expand(self, text: str) -> str:
        return _expand(text, self.texts, self.budget)

    def takes(self, line: str) -> bool:
        """Take a line that assigns, or begins or ends a branch; return False for others."""
        words = line.split() or [""]
        if self._defined is not None:
            if words[0] == "endef":
                self._assign(*self._defined, "\n".join(self._body))
                self._defined, self._body = None, []
            else:
                self._body.append(line)
            return True
        if line.startswith("\t"):
            return False
        if words[0] in ("ifeq", "ifneq", "ifdef", "ifndef", "else", "endif"):
            self._depth += words[0].startswith("if") - (words[0] == "endif")
            return True
        if definition := _DEFINITION.fullmatch(line.strip()):
            self._defined = (definition[1], definition[2])
            return True
        # A value of one target is taken for all, so that none is lost.
        of_target = _OF_TARGET.fullmatch(line.strip())
        assigned = _ASSIGNMENT.fullmatch(of_target[1] if of_target else line.strip())
        if assigned is not None:
            self._assign(*assigned.groups())
        return assigned is not None

    def _assign(self, name: str, sign: str, value: str) -> None:
        if sign.startswith(":"):
            # Expanded at once, and never again: what is left belongs to bash.
            value = self.expand(value).replace("$", "$$")
        earlier = self.texts.get(name)
        if earlier is not None and sign == "?" and not self._depth:
            return
        if earlier is not None and sign == "+":
            value = f"{earlier} {value}"
        elif earlier is not None and self._depth:
            # Only a run knows the branch, so the commands of all are read.
            value = f"{earlier}\n{value}"
        self.texts[name] = value


def _iterate_lines(
    path: Path, folder: Path, variables: _Variables, remarks: dict[str, None], *, seen: set[str]
) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, continued ones joined, without comments outside commands.

    Lines of included files that exist take the place of the line that names them. Each file is
    read once.

    Args:
        path: Path of the makefile.
        folder: Folder in which make runs.
        variables: Variables up to the current line, for the names of included files.
        remarks: Receives a sentence about each file that is not found.
        seen: Real paths of the files read so far.
    """
    seen.add(os.path.realpath(path))
    start, joined = 0, ""
    text = read_bounded(path, most=_MOST_IN_FILE) or ""
    for number, line in enumerate(text.splitlines(), 1):
        start = start if joined else number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        is_command = joined.startswith("\t")
        content = joined if is_command else re.sub(r"(?:^|\s)#.*", "", joined)
        joined = ""
        if content.split()[:1] not in (["include"], ["-include"], ["sinclude"]) or is_command:
            yield start, content
            continue
        for name in variables.expand(content).split()[1:]:
            parts = _find_included(name, (path.parent, folder))
            if not parts and content.startswith("include"):
                remarks[f"{path.name} includes {name}, which was not found"] = None
            for part in parts:
                if os.path.realpath(part) not in seen and len(seen) < _MOST_FILES:
                    yield from _iterate_lines(part, folder, variables, remarks, seen=seen)


def _find_included(name: str, folders: tuple[Path, Path]) -> list[Path]:
    """Return the files of a name or pattern in an include line, from the first folder with any."""
    for folder in folders:
        names = sorted(glob.glob(name, root_dir=folder)) if glob.has_magic(name) else [name]
        if parts := [part for each in names if is_regular(part := folder / each)]:
            return parts
    return []


def _expand(text: str, variables: dict[str, str], budget: _Budget) -> str:
    """Replace references to known variables; others stay, as variables of the environment."""
    given = min(budget.references, _MOST_IN_TEXT)
    own = _Budget(given)
    result = _follow(text, variables, own, frozenset())
    budget.references -= given - own.references
    return result


def _follow(text: str, variables: dict[str, str], budget: _Budget, active: frozenset[str]) -> str:
    text = _replace_calls(text, variables, budget, active)
    length = len(text)

    def replace(match: re.Match[str]) -> str:
        nonlocal length
        if match[3] == "$":
            return "$"
        name = match[1] or match[2] or match[3]
        # Make refuses a variable that refers to itself.
        if (
            name not in variables
            or name in active
            or length > _MOST_CHARACTERS
            or budget.references <= 0
            or len(active) >= _MOST_LEVELS
        ):
            return match[0] if match[3] else f"${{{name}}}"
        budget.references -= 1
        value = _follow(variables[name], variables, budget, active | {name})
        length += len(value)
        return value

    return _REFERENCE.sub(replace, text)


def _replace_calls(
    text: str, variables: dict[str, str], budget: _Budget, active: frozenset[str]
) -> str:
    """Replace ``$(call NAME,ARGUMENTS)`` by the text of a known variable with its arguments."""
    while (match := _CALL.search(text)) and budget.references > 0:
        budget.references -= 1
        opening, closing = match[1], {"(": ")", "{": "}"}[match[1]]
        parts, depth, at = [""], 1, match.end()
        while at < len(text):
            character = text[at]
            depth += (character == opening) - (character == closing)
            if depth == 0:
                break
            if character == "," and depth == 1:
                parts.append("")
            else:
                parts[-1] += character
            at += 1
        name, *arguments = [_follow(part, variables, budget, active) for part in parts]
        name = name.strip()
        known = variables | {str(number): each for number, each in enumerate(arguments, 1)}
        is_usable = name in variables and name not in active and len(active) < _MOST_LEVELS
        # What is unknown becomes a variable of bash, as other references do.
        value = (
            _follow(variables[name], known, budget, active | {name})
            if is_usable and len(text) < _MOST_CHARACTERS
            else f"${{{name}}}"
        )
        text = f"{text[: match.start()]}{value}{text[at + 1 :]}"
    return text
