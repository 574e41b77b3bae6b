"""Read a makefile's rules as bash, in all branches."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from temper_legacy_shim.scripts.make_variables import (
    NAME,
    Assignment,
    Budget,
    Scope,
    Variables,
    assign_all,
    expand,
    match_stem,
    to_bash,
)
from temper_legacy_shim.scripts.script_reading import is_regular, read_bounded

MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Names of the files that make looks for, in its order."""

_FUNCTION = re.compile(r"(?<!\$)\$[({]((?!call\b)[a-z][a-z-]*)[ \t]")
_LEFT_FUNCTION = re.compile(r"(?<!\$)\$[({]([a-z][a-z-]*)[ \t]")
_SUBSTITUTION = re.compile(rf"(?<!\$)(\$[({{](?:{NAME}):[^=(){{}}]*=[^(){{}}]*[)}}])")
"""A reference such as ``$(NAME:.x=.sh)``."""
_WITH_VALUE = frozenset(("-j", "-l", "-o", "-W", "-I"))
"""Options of make whose value may be the next word."""
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
    stem: str = ""
    """Text that % stands for in the rule's pattern."""
    scope: Scope | None = None
    """Variables of the target, and of the targets it is needed by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Makefile:
    """Rules by target, and variables as text that is expanded where it is used."""

    path: Path
    rules: dict[str, Rule]
    variables: dict[str, str]
    remarks: tuple[str, ...] = ()
    """Sentences about parts that were not read."""
    budget: Budget = field(default_factory=Budget)
    patterns: tuple[str, ...] = ()
    """Targets with %."""
    of_targets: dict[str, tuple[Assignment, ...]] = field(default_factory=dict)
    """Assignments for one target."""
    of_patterns: dict[str, tuple[Assignment, ...]] = field(default_factory=dict)
    """Assignments for targets that match a pattern."""

    def find_rule(self, target: str) -> Rule | None:
        """Return the rule of a target, which may be a pattern rule with its stem filled in."""
        if (rule := self.rules.get(target)) is not None:
            return rule
        for pattern in self.patterns:
            if stem := match_stem(target, pattern):
                rule = self.rules[pattern]
                needed = tuple(each.replace("%", stem, 1) for each in rule.prerequisites)
                return replace(rule, prerequisites=needed, stem=stem)
        return None

    def default_target(self) -> str:
        """Return the target of ``make`` without arguments; empty if there is none."""
        return next((name for name in self.rules if not name.startswith(".")), "")

    def write_commands(self, target: str, *, variables: dict[str, str]) -> str:
        """Return the commands of a target and of what it depends on, as a bash script.

        Args:
            target: Name of the target.
            variables: Variables of the command line, which replace those of the file.
        """
        lines: list[str] = []
        for name, rule in self._find_needed(target).items():
            text = to_bash(self._expand_commands(name, rule, variables))
            # @ hides a line, - ignores its error, + runs it even with -n.
            lines += [line.lstrip("@-+ \t") for line in text.split("\n")]
        return "\n".join(lines) + "\n"

    def _expand_commands(self, name: str, rule: Rule, variables: dict[str, str]) -> str:
        """Return the commands with their variables expanded, and dollars of bash still doubled."""
        needed = rule.prerequisites
        own = {"@": [name], "<": needed[:1], "^": needed, "+": needed, "?": needed}
        own |= {"*": [rule.stem]} if rule.stem else {}
        known = dict(self.variables)
        assign_all(rule.scope, known, self.budget)
        known |= variables
        for sign, words in own.items():
            known[sign] = " ".join(words)
            known[f"{sign}D"] = " ".join(os.path.dirname(each) or "." for each in words)
            known[f"{sign}F"] = " ".join(map(os.path.basename, words))
        return "\n".join(expand(line, known, self.budget) for line in rule.commands)

    def find_gaps(self, target: str, folder: Path, *, variables: dict[str, str]) -> list[str]:
        """Return sentences about parts of a target's commands that are not known.

        Args:
            target: Name of the target.
            folder: Folder of the script that calls make.
            variables: Variables of the command line.
        """
        out = list(self.remarks)
        folders = (self.path.parent, folder)

        def exists(name: str) -> bool:
            return any(os.path.lexists(each / name) for each in folders)

        needed = self._find_needed(target)
        for name, rule in needed.items():
            missing = [
                each for each in rule.prerequisites if each not in needed and not exists(each)
            ]
            if name not in self.rules and exists(name):
                # Make leaves a file as it is if the prerequisites of a pattern are missing.
                missing = []
            # Bash would take a function for a command, so it is looked for before bash reads it.
            text, expanded = "\n".join(rule.commands), self._expand_commands(name, rule, variables)
            functions = dict.fromkeys(
                [
                    *_FUNCTION.findall(text),
                    *_LEFT_FUNCTION.findall(expanded),
                    *_SUBSTITUTION.findall(expanded),
                ]
            )
            if functions:
                out.append(
                    f"the rule {name} of {self.path.name} uses functions of make "
                    f"({', '.join(functions)}), which were not evaluated"
                )
            if missing:
                out.append(
                    f"the rule {name} of {self.path.name} needs {' '.join(missing)[:80]}, for "
                    "which no rule or file was found"
                )
        if self.budget.references <= 0:
            out.append(
                f"{self.path.name} has more references to variables than were followed, so what it "
                "starts is not known"
            )
        return out[:_MOST_REMARKS]

    def _find_needed(self, target: str) -> dict[str, Rule]:
        """Return the rules that make would run by target, prerequisites first."""
        out, rules = dict[str, Rule](), dict[str, Rule]()
        num_from_patterns = 0
        # Generated makefiles have chains that are too long for recursion.
        waiting: list[tuple[str, Scope | None, bool]] = [(target, None, False)]
        while waiting:
            name, outer, has_prerequisites = waiting.pop()
            if has_prerequisites:
                out[name] = rules[name]
            elif name not in rules and (rule := self.find_rule(name)) is not None:
                # A pattern such as %: %.in matches its own prerequisite without end.
                num_from_patterns += name not in self.rules
                if num_from_patterns <= _MOST_FILES or name in self.rules:
                    scope = self._find_scope(name, outer)
                    rules[name] = replace(rule, scope=scope)
                    needed = reversed(rule.prerequisites)
                    waiting += [(name, scope, True), *((each, scope, False) for each in needed)]
        return out

    def _find_scope(self, target: str, outer: Scope | None) -> Scope | None:
        """Return the variables of a target inside those of the target that needs it."""
        own: list[Assignment] = []
        for pattern, assignments in self.of_patterns.items():
            self.budget.references -= 1
            if self.budget.references > 0 and match_stem(target, pattern):
                own += assignments
        own += self.of_targets.get(target, ())
        return Scope(tuple(own), outer) if own else outer


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
    """Read the rules and variables of a makefile and of the files that it includes.

    Rules of the same target are joined, and a static pattern rule becomes one rule for each target
    that matches. Commands are not expanded, because make expands them when it runs them.
    """
    lines: dict[str, int] = {}
    needed: dict[str, list[str]] = {}
    commands: dict[str, list[str]] = {}
    stems: dict[str, str] = {}
    variables = Variables()
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
        elif header := _parse_rule(_SUBSTITUTION.sub(variables.expand_match, line.rstrip())):
            current, prerequisites = (variables.expand(each).split() for each in header[:2])
            if pattern := variables.expand(header[2]).strip():
                for target in current:
                    stems[target] = match_stem(target, pattern)
                    if not stems[target]:
                        shown = f"{target} does not match {pattern} in {path.name}"
                        remarks[f"{shown}, so its rule was not read"] = None
                current = [target for target in current if stems[target]]
            for target in current:
                lines[target] = number
                needed.setdefault(target, []).extend(
                    each.replace("%", stems[target], 1) if pattern else each
                    for each in prerequisites
                    if each != "|"
                )
                commands.setdefault(target, []).extend(filter(None, header[3:]))
    rules = {
        target: Rule(
            line=number,
            prerequisites=tuple(needed[target]),
            commands=tuple(commands[target]),
            stem=stems.get(target, ""),
        )
        for target, number in lines.items()
    }
    of_targets = {name: tuple(each) for name, each in variables.of_targets.items()}
    return Makefile(
        path=path,
        rules=rules,
        variables=variables.texts,
        remarks=tuple(remarks),
        budget=variables.budget,
        patterns=tuple(target for target in rules if "%" in target),
        of_targets={name: each for name, each in of_targets.items() if "%" not in name},
        of_patterns={name: each for name, each in of_targets.items() if "%" in name},
    )


def _parse_rule(line: str) -> tuple[str, str, str, str] | None:
    """Return targets, prerequisites, static pattern and first command; None for other lines."""
    targets, colon, rest = line.partition(":")
    needed, _, command = rest.removeprefix(":").partition(";")
    pattern, second_colon, static = needed.partition(":")
    if second_colon and "%" in pattern:
        needed = static
    else:
        pattern = ""
    is_rule = colon and targets.strip() and not targets[0].isspace() and "=" not in needed
    if not is_rule or set("=#") & set(targets):
        return None
    return targets, needed, pattern, command.strip()


def _iterate_lines(
    path: Path, folder: Path, variables: Variables, remarks: dict[str, None], *, seen: set[str]
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
            if not parts and (content.split()[0] == "include" or _leads_outside(name)):
                how = "read" if _leads_outside(name) else "found"
                remarks[f"{path.name} includes {name}, which was not {how}"] = None
            for part in parts:
                if os.path.realpath(part) not in seen and len(seen) < _MOST_FILES:
                    yield from _iterate_lines(part, folder, variables, remarks, seen=seen)


def _find_included(name: str, folders: tuple[Path, Path]) -> list[Path]:
    """Return the files of a name or pattern in an include line, from the first folder with any."""
    if _leads_outside(name):
        return []
    for folder in folders:
        try:
            matches = islice(glob.iglob(name, root_dir=folder), _MOST_FILES)
            names = sorted(matches) if glob.has_magic(name) else [name]
        except ValueError:  # a NUL
            return []
        if parts := [part for each in names if is_regular(part := folder / each)]:
            return parts
    return []


def _leads_outside(name: str) -> bool:
    """Check for a pattern that could walk through the file system."""
    return glob.has_magic(name) and (name.startswith("/") or ".." in name.split("/"))
