"""Expand variables of a makefile; of make's functions only `call` is followed."""

import re
from dataclasses import dataclass

_ASSIGNMENT = re.compile(r"(?:(?:export|override|private)\s+)*([\w.-]+)\s*(:{0,3}|\?|\+)=\s*(.*)")
_OF_TARGET = re.compile(
    r"([^:=#]+)::?\s*((?:(?:export|override|private)\s+)*[\w.-]+\s*(?:\?|\+|:{0,3})=.*)"
)
_DEFINITION = re.compile(r"define\s+([\w.-]+)\s*(:{0,3}|\?|\+)=?")
NAME = r"[\w.-]+|[@<^+?*][DF]?"
"""Pattern of a variable's name in a reference."""
_CHANGE = r"(?::([^=(){}\s]*)=([^(){}\s]*))?"
_REFERENCE = re.compile(rf"\$(?:\(({NAME}){_CHANGE}\)|\{{({NAME}){_CHANGE}\}}|([@<^+?*0-9]|\$))")
_OF_BASH = re.compile(r"\$\$|\$(?![({](?!call\b)[a-z][a-z-]*[ \t])")
"""A dollar that begins no function of make."""
_CALL = re.compile(r"(?<!\$)\$([({])call[ \t]+")
_MOST_CHARACTERS = 100_000
"""Length of one expanded text."""
_MOST_REFERENCES = 200_000
"""Number of references to variables that are followed in one makefile."""
_MOST_IN_TEXT = 2_000
"""Number of references that one text leads to."""
_MOST_LEVELS = 50
"""Number of variables that refer to each other in a chain, and of calls in arguments of calls."""


@dataclass(slots=True)
class Budget:
    """References to variables that may still be followed."""

    references: int = _MOST_REFERENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    name: str
    sign: str
    """Empty, or the characters before ``=``."""
    value: str
    is_in_branch: bool

    def apply(self, texts: dict[str, str], budget: Budget) -> None:
        """Assign to the variables in `texts`."""
        value = self.value
        if self.sign.startswith(":"):
            # Expanded at once, and never again: what is left belongs to bash, but for functions.
            value = _OF_BASH.sub("$$", expand(value, texts, budget))
        earlier = texts.get(self.name)
        if earlier is not None and self.sign == "?" and not self.is_in_branch:
            return
        if earlier is not None and self.sign == "+":
            value = f"{earlier} {value}"
        elif earlier is not None and self.is_in_branch:
            # Only a run knows the branch, so the commands of all are read.
            value = f"{earlier}\n{value}"
        texts[self.name] = value


@dataclass(frozen=True, slots=True)
class Scope:
    """Assignments for one target, and the scope of the target that needs it.

    Scopes are linked, because copies for each target of a long chain would fill the memory.
    """

    assignments: tuple[Assignment, ...]
    outer: "Scope | None"


def assign_all(scope: Scope | None, texts: dict[str, str], budget: Budget) -> None:
    """Assign the variables of a target; make hands those of outer scopes down to it."""
    scopes: list[Scope] = []
    while scope is not None and len(scopes) < budget.references:
        scopes.append(scope)
        scope = scope.outer
    for each in reversed(scopes):
        for assignment in each.assignments:
            # Assignments count as references, so that a generated makefile is read in short time.
            if budget.references <= 0:
                return
            budget.references -= 1
            assignment.apply(texts, budget)


class Variables:
    """The variables of a makefile so far."""

    def __init__(self) -> None:
        self.texts = {"MAKE": "make"}
        self.of_targets: dict[str, list[Assignment]] = {}
        """Assignments for one target or pattern."""
        self.budget = Budget()
        self._depth = 0
        self._defined: tuple[str, str] | None = None
        self._body: list[str] = []

    def expand(self, text: str) -> str:
        return to_bash(expand(text, self.texts, self.budget))

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
        of_target = _OF_TARGET.fullmatch(line.strip())
        assigned = _ASSIGNMENT.fullmatch(of_target[2] if of_target else line.strip())
        if assigned is not None and of_target is not None:
            for target in self.expand(of_target[1]).split():
                assignments = self.of_targets.setdefault(target, [])
                assignments.append(self._assignment(*assigned.groups()))
        elif assigned is not None:
            self._assign(*assigned.groups())
        return assigned is not None

    def _assignment(self, name: str, sign: str, value: str) -> Assignment:
        return Assignment(name=name, sign=sign, value=value, is_in_branch=self._depth > 0)

    def _assign(self, name: str, sign: str, value: str) -> None:
        self._assignment(name, sign, value).apply(self.texts, self.budget)


def match_stem(target: str, pattern: str) -> str:
    """Return the text that % stands for; empty if the target does not match the pattern."""
    before, _, after = pattern.partition("%")
    is_match = target.startswith(before) and target.endswith(after)
    return target[len(before) : len(target) - len(after)] if is_match else ""


def to_bash(expanded: str) -> str:
    return expanded.replace("$$", "$")


def expand(text: str, variables: dict[str, str], budget: Budget) -> str:
    """Replace references to known variables; others stay, as variables of the environment.

    ``$$`` stays, so that a text that is expanded is not changed by a second expansion.
    """
    given = min(budget.references, _MOST_IN_TEXT)
    own = Budget(given)
    result = _follow(text, variables, own, frozenset(), level=0)
    budget.references -= given - own.references
    return result


def _follow(
    text: str, variables: dict[str, str], budget: Budget, active: frozenset[str], *, level: int
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
    stems = [(word, match_stem(word, pattern)) for word in text.split()]
    return " ".join(template.replace("%", stem, 1) if stem else word for word, stem in stems)


def _replace_calls(
    text: str, variables: dict[str, str], budget: Budget, active: frozenset[str], *, level: int
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
