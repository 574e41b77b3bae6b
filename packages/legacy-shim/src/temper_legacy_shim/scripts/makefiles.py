"""Read a makefile's rules as bash, in all branches; of make's functions only `call` is followed."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from temper_legacy_shim.scripts.script_reading import is_regular, read_bounded

MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Names of the files that make looks for, in its order."""

_ASSIGNMENT = re.compile(r"(?:(?:export|override|private)\s+)*([\w.-]+)\s*(:{0,3}|\?|\+)=\s*(.*)")
_OF_TARGET = re.compile(r"[^:=#]+::?\s+([\w.-]+\s*(?:\?|\+|:{0,3})=.*)")
_DEFINITION = re.compile(r"define\s+([\w.-]+)\s*(:{0,3}|\?|\+)=?")
_NAME = r"[\w.-]+|[@<^+?*][DF]?"
_CHANGE = r"(?::([^=(){}\s]*)=([^(){}\s]*))?"
_REFERENCE = re.compile(rf"\$(?:\(({_NAME}){_CHANGE}\)|\{{({_NAME}){_CHANGE}\}}|([@<^+?*0-9]|\$))")
_FUNCTION = re.compile(r"(?<!\$)\$[({]((?!call\b)[a-z][a-z-]*)[ \t]")
_LEFT_FUNCTION = re.compile(r"(?<!\$)\$[({]([a-z][a-z-]*)[ \t]")
_SUBSTITUTION = re.compile(r"(?<!\$)(\$[({][\w.-]+:[^=(){}]*=[^(){}]*[)}])")
"""A reference such as ``$(NAME:.x=.sh)``."""
_OF_BASH = re.compile(r"\$\$|\$(?![({](?!call\b)[a-z][a-z-]*[ \t])")
"""A dollar that begins no function of make."""
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
"""Number of variables that refer to each other in a chain, and of calls in arguments of calls."""
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
    patterns: tuple[str, ...] = ()
    """Targets with %."""

    def find_rule(self, target: str) -> Rule | None:
        """Return the rule of a target, which may be a pattern rule with its stem filled in."""
        if (rule := self.rules.get(target)) is not None:
            return rule
        for pattern in self.patterns:
            if stem := _match_stem(target, pattern):
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
            text = _to_bash(self._expand_commands(name, rule, variables))
            # @ hides a line, - ignores its error, + runs it even with -n.
            lines += [line.lstrip("@-+ \t") for line in text.split("\n")]
        return "\n".join(lines) + "\n"

    def _expand_commands(self, name: str, rule: Rule, variables: dict[str, str]) -> str:
        """Return the commands with their variables expanded, and dollars of bash still doubled."""
        needed = rule.prerequisites
        own = {"@": [name], "<": needed[:1], "^": needed, "+": needed, "?": needed}
        own |= {"*": [rule.stem]} if rule.stem else {}
        known = self.variables | variables
        for sign, words in own.items():
            known[sign] = " ".join(words)
            known[f"{sign}D"] = " ".join(os.path.dirname(each) or "." for each in words)
            known[f"{sign}F"] = " ".join(map(os.path.basename, words))
        return "\n".join(_expand(line, known, self.budget) for line in rule.commands)

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
        waiting = [(target, False)]
        while waiting:
            name, has_prerequisites = waiting.pop()
            if has_prerequisites:
                out[name] = rules[name]
            elif name not in rules and (rule := self.find_rule(name)) is not None:
                # A pattern such as %: %.in matches its own prerequisite without end.
                num_from_patterns += name not in self.rules
                if num_from_patterns <= _MOST_FILES or name in self.rules:
                    rules[name] = rule
                    needed = reversed(rule.prerequisites)
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
    stems: dict[str, str] = {}
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
        elif header := _parse_rule(_SUBSTITUTION.sub(variables.expand_match, line.rstrip())):
            current, prerequisites = (variables.expand(each).split() for each in header[:2])
            if pattern := variables.expand(header[2]).strip():
                for target in current:
                    stems[target] = _match_stem(target, pattern)
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
    return Makefile(
        path=path,
        rules=rules,
        variables=variables.texts,
        remarks=tuple(remarks),
        budget=variables.budget,
        patterns=tuple(target for target in rules if "%" in target),
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


def _match_stem(target: str, pattern: str) -> str:
    """Return the text that % stands for; empty if the target does not match the pattern."""
    before, _, after = pattern.partition("%")
    is_match = target.startswith(before) and target.endswith(after)
    return target[len(before) : len(target) - len(after)] if is_match else ""


class _Variables:
    """The variables of a makefile so far."""

    def __init__(self) -> None:
        self.texts = {"MAKE": "make"}
        self.budget = _Budget()
        self._depth = 0
        self._defined: tuple[str, str] | None = None
        self._body: list[str] = []

    def expand(self, text: str) -> str:
        return _to_bash(_expand(text, self.texts, self.budget))

    def expand_match(self, match: re.Match[str]) -> str:
        return self.expand(match[0])

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
            # Expanded at once, and never again: what is left belongs to bash, but for functions.
            value = _OF_BASH.sub("$$", _expand(value, self.texts, self.budget))
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


def _to_bash(expanded: str) -> str:
    return expanded.replace("$$", "$")


def _expand(text: str, variables: dict[str, str], budget: _Budget) -> str:
    """Replace references to known variables; others stay, as variables of the environment.

    ``$$`` stays, so that a text that is expanded is not changed by a second expansion.
    """
    given = min(budget.references, _MOST_IN_TEXT)
    own = _Budget(given)
    result = _follow(text, variables, own, frozenset(), level=0)
    budget.references -= given - own.references
    return result


def _follow(
    text: str, variables: dict[str, str], budget: _Budget, active: frozenset[str], *, level: int
) -> str:
    text = _replace_calls(text, variables, budget, active, level=level)
    length = len(text)

    def replace(match: re.Match[str]) -> str:
        nonlocal length
        if match[7] == "$":
            return "$$"
        name = match[1] or match[4] or match[7]
        old, new = (match[2], match[3]) if match[1] else (match[5], match[6])
        # Make refuses a variable that refers to itself.
        if (
            name not in variables
            or name in active
            or length > _MOST_CHARACTERS
            or budget.references <= 0
            or len(active) >= _MOST_LEVELS
        ):
            return match[0] if match[7] or old is not None else f"${{{name}}}"
        budget.references -= 1
        value = _follow(variables[name], variables, budget, active | {name}, level=level)
        if old is not None:
            value = _substitute(value, old, new)
        length += len(value)
        return value

    return _REFERENCE.sub(replace, text)


def _substitute(text: str, old: str, new: str) -> str:
    """Return the words of ``$(NAME:old=new)``: a pattern, or a suffix without %."""
    pattern, template = (old, new) if "%" in old else (f"%{old}", f"%{new}")
    stems = [(word, _match_stem(word, pattern)) for word in text.split()]
    return " ".join(template.replace("%", stem, 1) if stem else word for word, stem in stems)


def _replace_calls(
    text: str, variables: dict[str, str], budget: _Budget, active: frozenset[str], *, level: int
) -> str:
    """Replace ``$(call NAME,ARGUMENTS)`` by the text of a known variable with its arguments.

    Args:
        text: A text with calls.
        variables: Known variables.
        budget: Number of references that may still be followed.
        active: Variables whose text is being expanded.
        level: Number of calls in whose arguments the text is.
    """
    if level >= _MOST_LEVELS:
        # Under this name the call stays, and is reported as a function that was not evaluated. A
        # variable that is being expanded would take its place otherwise.
        return _CALL.sub(r"$\1nested-call ", text)
    done = ""
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
        name, *arguments = [
            _follow(part, variables, budget, active, level=level + 1) for part in parts
        ]
        name = name.strip()
        known = variables | {str(number): each for number, each in enumerate(arguments, 1)}
        is_usable = name in variables and name not in active and len(active) < _MOST_LEVELS
        # What is unknown becomes a variable of bash, as other references do.
        value = (
            _follow(variables[name], known, budget, active | {name}, level=level)
            if is_usable and len(done) + len(text) < _MOST_CHARACTERS
            else f"${{{name}}}"
        )
        done += text[: match.start()] + value
        text = text[at + 1 :]
    return done + text
