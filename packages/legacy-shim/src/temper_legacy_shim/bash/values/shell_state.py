"""State of a shell during reading: variables in scopes, positional parameters, functions, limits.

``Shell`` is a (sub)shell. All shells of a script share a ``Reading``, which records commands,
notes and decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from temper_legacy_shim.bash.syntax.syntax_tree import Command, Program, Span, Word
from temper_legacy_shim.bash.values.shell_values import (
    Field,
    Fragment,
    Piece,
    Text,
    Truth,
    Variable,
    literal,
    unknown,
)
from temper_legacy_shim.errors import ScriptError

MAX_STEPS = 10_000
MAX_WORDS = 100_000
MAX_FORKS = 60
AMBIENT = frozenset(
    (
        *(
            "HOME",
            "PWD",
            "OLDPWD",
            "USER",
            "LOGNAME",
            "HOSTNAME",
            "PATH",
            "SHELL",
            "TMPDIR",
            "TERM",
            "SHLVL",
            "UID",
            "EUID",
            "PPID",
        ),
        *(
            "RANDOM",
            "SRANDOM",
            "SECONDS",
            "EPOCHSECONDS",
            "EPOCHREALTIME",
            "LINENO",
            "BASHPID",
            "BASH",
            "BASH_VERSION",
            "BASH_SOURCE",
        ),
        *("FUNCNAME", "DIRSTACK", "HOSTTYPE", "MACHTYPE", "OSTYPE", "_", "0", "$", "!", "-"),
    )
)
"""Names that have a value in every shell, which a reader does not know."""


class Exit(Exception):
    """``exit``: the shell ends."""


class Return(Exception):
    """``return``: the function ends."""


class Jump(Exception):
    """``break`` and ``continue``, through this many loops."""

    def __init__(self, *, is_break: bool, levels: int) -> None:
        super().__init__()
        self.is_break, self.levels = is_break, levels


class Stopped(Exception):
    """Bash would end the shell here, with a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedFile:
    """A file the script sources."""

    path: str
    """Path relative to the script's folder."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderHooks:
    """Knowledge of the caller about commands that are not the shell's own."""

    explain_failure: Callable[[Sequence[Field]], str | None] = lambda fields: None
    """Return a note if a command must be treated as failed, else None."""
    is_launch_text: Callable[[str], bool] = lambda text: False
    """Return True for text that is read as a script although the script only writes it."""
    read_sourced: Callable[[str], SourcedFile | None] = lambda path: None
    """Return a file the script sources, else None."""


class Interpreter(Protocol):
    """Parts of the reader that call each other; each shell carries them to avoid import cycles."""

    def expand_text(self, shell: Shell, word: Word, /) -> Text:
        """Expand a word that is not split."""

    def expand_pattern(
        self, shell: Shell, word: Word, /
    ) -> tuple[list[tuple[str, bool]], bool, bool]:
        """Expand a word to a pattern."""

    def expand_fragments(self, shell: Shell, word: Word, /, *, in_quotes: bool) -> list[Fragment]:
        """Expand the parts of a word without splitting them."""

    def calculate(self, shell: Shell, expression: Word, source: str, /) -> Text:
        """Evaluate an arithmetic expression."""

    def run(self, shell: Shell, program: Program, /) -> None:
        """Run a program in this shell."""

    def run_isolated(self, shell: Shell, program: Program, /) -> None:
        """Run a program so that an exit in it ends only that program."""

    def run_command(self, shell: Shell, command: Command, /) -> None:
        """Run one command."""

    def truth_status(
        self, shell: Shell, truth: Truth, span: Span, /, *, is_decided: bool
    ) -> int | None:
        """Return the exit status of a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A command that would run and is not the shell's own."""

    fields: tuple[Field, ...]
    environment: tuple[tuple[str, Text], ...]
    span: Span
    """Position in the script; for ``bash -c`` that of the outer command."""
    arguments: Span
    """Span of its words; empty if it is not written as words."""
    item: Span
    """The pipelines around it, up to ``;``, ``&`` or the end of the line."""
    stdin: Text | None
    """Text of the heredoc, if the command has one."""
    is_inner: bool
    """True inside ``bash -c``, ``eval`` or a heredoc, where the text is not the script's."""
    is_written: bool = False
    """True in text the script writes to a file or submits, which may run it later."""
    input_file: str = ""
    """File that is redirected to the command; empty if none is."""
    sourced_file: str = ""
    """Sourced file with the command; empty for the script itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A condition that the text does not decide."""

    span: Span
    what: str
    taken: int
    """0 is false; 1 true; of a case the number of the branch, 0 for none."""
    num_choices: int
    is_assumed: bool
    """Decided as if variables the script does not assign were unset."""


@dataclass(slots=True)
class Reading:
    """State shared by all shells of one pass over a script."""

    text: str
    choices: Sequence[int] = ()
    """Choices for the first undecided conditions, instead of the defaults."""
    settings: dict[str, str] = field(default_factory=dict)
    """Variables given from outside, which the script may overwrite."""
    replaced: Mapping[int, str] = field(default_factory=dict)
    """Other values of assignments, by their position."""
    hooks: ReaderHooks = field(default_factory=ReaderHooks)
    passes_guards: bool = False
    """Continue after ``exit`` with an error, as if the condition had been false."""
    events: list[Event] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """Sentences for a person, with the line of each."""
    free: dict[str, bool] = field(default_factory=dict)
    """Variables that are used but never assigned; True if any use has no default."""
    executed: set[int] = field(default_factory=set)
    """Positions of commands and assignments that were run."""
    inner_functions: set[str] = field(default_factory=set)
    """Functions that another text than the script defines, so that their spans are not its own."""
    folders: dict[str, None] = field(default_factory=dict)
    """Folders the script changes to, in order."""
    input_file: str = ""
    """File the command being run reads as its standard input."""
    num_arguments: int = 0
    """Positional parameters the script reads."""
    steps: int = 0
    words: int = 0
    """Arguments and elements that expansions made."""
    is_writing: bool = False
    """True while text is read that the script only writes."""
    inner: Span | None = None
    """The outer command while text inside ``bash -c``, ``eval`` or a heredoc is read."""
    sourcing: list[str] = field(default_factory=list)
    """Paths of the sourced files that are being read, the outer one first."""
    item: Span = field(default_factory=lambda: Span(0, 0))
    """The list of pipelines that is being run."""
    arguments: Span = field(default_factory=lambda: Span(0, 0))
    """The words of the command that is being run."""

    def step(self) -> None:
        """Count one command or expansion.

        Raises:
            ScriptError: more than a launch script needs.
        """
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ScriptError(
                f"the script takes more than {MAX_STEPS} steps to read: it does more than launch, "
                "or loops for ever."
            )

    def count_words(self, number: int) -> None:
        """Count the words of an expansion.

        A loop can copy and lengthen a list in each round, so a few steps can make very many words.

        Raises:
            ScriptError: more than a launch script needs.
        """
        self.words += number
        if self.words > MAX_WORDS:
            raise ScriptError(
                f"the script expands to more than {MAX_WORDS} words: it does more than launch, or "
                "loops for ever."
            )

    def note(self, sentence: str, at: int) -> None:
        # A note in a loop with changing values could otherwise fill the report.
        if len(self.notes) < 200:
            self.notes.setdefault(sentence, self.line(at))

    def line(self, at: int) -> int:
        at = self.inner.start if self.inner is not None else at
        return self.text.count("\n", 0, max(at, 0)) + 1

    def decide(
        self, span: Span, what: str, *, usual: int, num_choices: int = 2, is_assumed: bool = False
    ) -> int:
        """Choose at a condition that the text does not decide, and record it."""
        index = len(self.decisions)
        # More decisions cannot be explored, and their usual branch is as good as any other.
        if index > 200:
            return usual
        taken = self.choices[index] if index < len(self.choices) else usual
        position = self.inner or span
        self.decisions.append(
            Decision(
                span=position,
                what=what,
                taken=taken,
                num_choices=num_choices,
                is_assumed=is_assumed,
            )
        )
        return taken


class Shell:
    """A shell: the script's, a subshell, or a function's view of either."""

    def __init__(self, reading: Reading, interpreter: Interpreter) -> None:
        self.reading = reading
        self.interpreter = interpreter
        self.scopes: list[dict[str, Variable]] = [{}]
        self.functions: dict[str, Command] = {}
        self.positional: list[Field] | None = None
        """None at the top, where the user's arguments are open; else counted from `shifted`."""
        self.shifted = 0
        self.status: int | None = 0
        """Status of the last command; None if unknown before a run."""
        self.captured: Text | None = None
        """Output of a substitution's commands, perhaps unknown; None outside of one."""
        self.stdin: Text | None = None
        self.pending: Truth | None = None
        """A test with an uncertain result, for the code that uses the status."""
        self.forks = 0
        for name, value in reading.settings.items():
            if name.isdigit():
                continue
            self.scopes[0][name] = Variable(literal(value), is_exported=True)
        given = [int(name) for name in reading.settings if name.isdigit() and int(name) > 0]
        if given:
            texts = [
                literal(reading.settings.get(str(number), ""))
                for number in range(1, max(given) + 1)
            ]
            self.positional = [Field(text, text.raw()) for text in texts]

    def fork(self) -> Shell:
        """Start a subshell, which keeps changes to itself."""
        if self.forks >= MAX_FORKS:
            raise ScriptError(
                f"more than {MAX_FORKS} shells inside each other: the script calls itself."
            )
        # Copying the variables takes time too, so it counts as steps of the limit.
        self.reading.steps += sum(map(len, self.scopes)) // 4
        child = Shell.__new__(Shell)
        child.reading, child.interpreter = self.reading, self.interpreter
        child.scopes = [
            {name: _copy(variable) for name, variable in scope.items()} for scope in self.scopes
        ]
        child.functions = dict(self.functions)
        child.positional = None if self.positional is None else list(self.positional)
        child.shifted, child.status, child.captured, child.stdin = (
            self.shifted,
            self.status,
            None,
            self.stdin,
        )
        child.pending = None
        child.forks = self.forks + 1
        return child

    def take_pending(self) -> Truth | None:
        """Return the test whose answer is not certain, once."""
        pending, self.pending = self.pending, None
        return pending

    def separators(self) -> str:
        """Return ``$IFS``."""
        variable = self.find("IFS")
        text = None if variable is None else variable.scalar()
        return " \t\n" if text is None else text.shown()

    def find(self, name: str) -> Variable | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def variable(self, name: str) -> Variable:
        """Return the variable to assign to, made in the outermost scope if there is none."""
        result = self.find(name)
        if result is None:
            result = self.scopes[0][name] = Variable()
        return result

    def assign(self, name: str, text: Text) -> None:
        """Run ``name=text``."""
        variable = self.variable(name)
        if variable.case and (known := text.known) is not None:
            text = literal(known.lower() if variable.case == "lower" else known.upper())
        if variable.elements is not None:
            variable.elements["0" if variable.is_associative else 0] = Field(text, text.raw())
        else:
            variable.text = text

    def unset(self, name: str) -> None:
        """Run ``unset name``."""
        for scope in reversed(self.scopes):
            if name in scope:
                # A variable without value: it hides the one of the environment from then on.
                scope[name] = Variable()
                return
        self.scopes[0][name] = Variable()

    def scalar(self, name: str) -> Text | None:
        """Return the value of ``$name``; None if it is unset for certain or by assumption."""
        # An ambient name, and a positional parameter of the script itself, is an unknown text.
        if name.isdigit() and name != "0":
            return self._positional(int(name))
        variable = self.find(name)
        if variable is not None:
            return variable.scalar()
        if name == "?":
            return literal(str(self.status)) if self.status is not None else unknown("$?")
        if name == "#":
            if self.positional is None:
                return unknown("$#")
            return literal(str(len(self.positional)))
        if name in AMBIENT:
            return unknown(f"${name}" if not name[0].isalpha() else f"${{{name}}}")
        return None

    def _positional(self, number: int) -> Text | None:
        if self.positional is None:
            return None
        return self.positional[number - 1].text if number <= len(self.positional) else None

    def is_assigned(self, name: str) -> bool:
        """Check if the script assigns or unsets a name."""
        return self.find(name) is not None or (self.positional is not None and name.isdigit())

    def free_text(self, name: str, source: str, *, has_default: bool) -> Text:
        """Return the unknown value of a name the script never assigns."""
        if name.isdigit():
            number = int(name) + self.shifted
            self.reading.num_arguments = max(
                self.reading.num_arguments, 0 if has_default else number
            )
            # Named by its first place, so that it stays the same value after a shift.
            return Text(
                (
                    Piece(
                        f"${number}" if number < 10 else f"${{{number}}}",
                        source,
                        is_known=False,
                        is_unset=True,
                    ),
                )
            )
        if has_default:
            self.reading.free.setdefault(name, False)
        elif name not in AMBIENT:
            self.reading.free[name] = True
        return unknown(source, is_unset=True)

    def arguments(self) -> list[Field]:
        """Return ``"$@"``; for the script itself one field that stands for the user's arguments."""
        if self.positional is not None:
            return list(self.positional)
        name = f"$@ from {self.shifted + 1}" if self.shifted else "$@"
        return [Field(Text((Piece(name, "$@", is_known=False, is_unset=True),)), '"$@"')]


def _copy(variable: Variable) -> Variable:
    elements = None if variable.elements is None else dict(variable.elements)
    return Variable(
        variable.text,
        elements,
        variable.is_associative,
        variable.is_exported,
        variable.is_integer,
        variable.case,
    )
