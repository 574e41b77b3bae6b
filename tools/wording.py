"""Check names and prose against the words of the style guide, which ruff cannot do.

Ruff checks the form of docstrings; this checks how they open, how many of them start with a verb,
and whether identifiers, file names, docstrings, comments, error messages, log messages and pages
for users use the field's words. All words are in tools/wording.toml.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORDS = Path("tools") / "wording.toml"

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FIRST_WORD = re.compile(r"[^\W\d_]+")
# Blocks of code on a page, and inline code.
_PYTHON_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^ *```.*?^ *```|`[^`]+`", re.MULTILINE | re.DOTALL)
# Methods of a logger, and warnings.warn: their string arguments are read by people.
_LOG_METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical"}

_FORMS = {"function": "an imperative verb", "test": "a sentence that states the rule"}
"""The start of a docstring, by its kind; the other kinds start with a noun phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedName:
    """One entry of `[[name]]` in wording.toml."""

    words: tuple[str, ...]
    instead: str
    why: str
    allow: tuple[str, ...] = ()
    """Identifiers in which the word is right, for example because a library named them."""
    is_full_name: bool = False
    """Ban the word only as an entire name: then `found`, but not `test_file_is_found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedPhrase:
    """One entry of `[[phrase]]` in wording.toml: words not to use in prose."""

    phrase: str
    """A regular expression; a space in it matches line breaks too."""
    instead: str
    why: str

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Find the phrase as full words, in upper or lower case."""
        pattern = self.phrase.replace(" ", r"\s+")
        return re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The contents of wording.toml."""

    checked: tuple[str, ...]
    """Glob patterns of folders to check, below the repository."""
    exempt: Mapping[str, str]
    """Reasons for not checking a folder yet, by its path."""
    pages: tuple[str, ...]
    """Glob patterns of pages, and tables of messages, for users, below the repository."""
    openings: frozenset[str]
    """Words that no docstring starts with."""
    verbs: frozenset[str]
    min_verb_fraction: float
    """Fraction of the function docstrings of a folder that must start with one of `verbs`."""
    prepositions: frozenset[str]
    """First words of function names that say nothing about what the function does."""
    names: Mapping[str, BannedName]
    """Banned names by word, in lower case."""
    phrases: tuple[BannedPhrase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """One docstring, with the definition it belongs to."""

    kind: str
    """module, class, function, test, property (or fixture), or field."""
    line: int
    text: str

    @property
    def first_word(self) -> str:
        """The first word in lower case; empty if the text has none."""
        match = _FIRST_WORD.search(self.text)
        return match.group().lower() if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Text for people other than a docstring: a comment, an error message or a log message."""

    kind: str
    line: int
    text: str


def read_wording(file: Path) -> Wording:
    """Read the word lists."""
    data: dict[str, Any] = tomllib.loads(file.read_text())
    banned = [
        BannedName(
            words=tuple(entry["words"]),
            instead=entry["instead"],
            why=entry["why"],
            allow=tuple(entry.get("allow", ())),
            is_full_name=entry.get("is_full_name", False),
        )
        for entry in data["name"]
    ]
    return Wording(
        checked=tuple(data["checked"]),
        exempt=data["exempt"],
        pages=tuple(data["pages"]),
        openings=frozenset(data["docstrings"]["openings"]),
        verbs=frozenset(data["docstrings"]["verbs"].split()),
        min_verb_fraction=data["docstrings"]["min_verb_fraction"],
        prepositions=frozenset(data["functions"]["prepositions"]),
        names={word: entry for entry in banned for word in entry.words},
        phrases=tuple(BannedPhrase(**entry) for entry in data["phrase"]),
    )


def check_folder(folder: Path, wording: Wording, *, root: Path) -> list[str]:
    """Check every Python file below a folder; return one line for each fault."""
    faults: list[str] = []
    functions: list[tuple[str, Docstring]] = []
    for path in sorted(folder.rglob("*.py")):
        shown = path.relative_to(root).as_posix()
        faults += [f"{shown}:1: {fault}" for fault in _file_name_faults(path, folder, wording)]
        source = path.read_text()
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        docstrings = list(_docstrings(nodes))
        prose = [
            *(Prose(kind="docstring", line=each.line, text=each.text) for each in docstrings),
            *_comments(source),
            *_messages(nodes),
        ]
        faults += [
            f"{shown}:{line}: {fault}"
            for line, fault in sorted(
                [
                    *_name_faults(nodes, wording),
                    *_docstring_faults(docstrings, wording),
                    *_phrase_faults(prose, wording),
                ]
            )
        ]
        functions += [(shown, each) for each in docstrings if each.kind == "function"]
    return faults + _verb_faults(functions, wording, folder=folder.relative_to(root).as_posix())


def check_page(path: Path, wording: Wording, *, root: Path) -> list[str]:
    """Check sentences of a page or table, and names in its Python; return a line for each fault."""
    source = path.read_text()
    faults = []
    for block in _PYTHON_BLOCK.finditer(source):
        try:
            nodes = list(ast.walk(ast.parse(block["code"])))
        except SyntaxError:  # An excerpt, for example the body of a function.
            continue
        first = source.count("\n", 0, block.start("code"))
        faults += [(first + line, fault) for line, fault in _name_faults(nodes, wording)]
    # Code is left out with its line breaks in place, so that lines keep their numbers.
    text = _CODE.sub(lambda code: "`code`" + "\n" * code.group().count("\n"), source)
    faults += _phrase_faults([Prose(kind="page", line=1, text=text)], wording)
    shown = path.relative_to(root).as_posix()
    return [f"{shown}:{line}: {fault}" for line, fault in sorted(faults)]


def _file_name_faults(path: Path, folder: Path, wording: Wording) -> Iterator[str]:
    relative = path.relative_to(folder)
    for part in (*relative.parts[:-1], relative.stem):
        for word, banned in _banned_words(part, wording):
            yield _name_fault(f"the path {relative.as_posix()}", word, banned)


def _name_faults(nodes: Sequence[ast.AST], wording: Wording) -> Iterator[tuple[int, str]]:
    for line, name in sorted(set(_defined_names(nodes))):
        for word, banned in _banned_words(name, wording):
            yield line, _name_fault(f"`{name}`", word, banned)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_noun(node):
            parts = _words(node.name)
            if len(parts) > 1 and parts[0] in wording.prepositions:
                yield (
                    node.lineno,
                    (
                        f"function `{node.name}` starts with the preposition '{parts[0]}': "
                        "start with a verb that says what it does"
                    ),
                )


def _docstring_faults(
    docstrings: Sequence[Docstring], wording: Wording
) -> Iterator[tuple[int, str]]:
    for each in docstrings:
        if each.first_word in wording.openings:
            opening = each.text.split(maxsplit=1)[0]
            form = _FORMS.get(each.kind, "a noun phrase")
            yield (
                each.line,
                (
                    f"the {each.kind} docstring starts with '{opening}': start with {form}, "
                    "or delete it if it adds nothing to the name"
                ),
            )


def _phrase_faults(prose: Sequence[Prose], wording: Wording) -> Iterator[tuple[int, str]]:
    for each in prose:
        for banned in wording.phrases:
            for match in banned.find(each.text):
                line = each.line + each.text.count("\n", 0, match.start())
                words = " ".join(match.group().split())
                yield (
                    line,
                    f"the {each.kind} says '{words}': write {banned.instead} ({banned.why})",
                )


def _verb_faults(
    functions: Sequence[tuple[str, Docstring]], wording: Wording, *, folder: str
) -> list[str]:
    """Report the functions without a verb if there are too many of them."""
    others = [(path, each) for path, each in functions if each.first_word not in wording.verbs]
    fraction = 1 - len(others) / len(functions) if functions else 1.0
    if fraction >= wording.min_verb_fraction:
        return []
    return [
        *(
            f"{path}:{each.line}: the function docstring starts with "
            f"'{each.text.split(maxsplit=1)[0]}': start with an imperative verb"
            for path, each in others
        ),
        (
            f"{folder}: {fraction:.0%} of the function docstrings start with a verb that {WORDS} "
            f"lists; {wording.min_verb_fraction:.0%} must"
        ),
    ]


def _name_fault(location: str, word: str, banned: BannedName) -> str:
    return f"'{word}' in {location}: write {banned.instead} ({banned.why})"


def _banned_words(name: str, wording: Wording) -> Iterator[tuple[str, BannedName]]:
    for word in _words(name):
        banned = wording.names.get(word)
        if banned is None or any(allowed in name for allowed in banned.allow):
            continue
        if not banned.is_full_name or name.strip("_").lower() == word:
            yield word, banned


def _words(name: str) -> list[str]:
    """Split an identifier into lower-case words: `WeightBucket_of` gives weight, bucket, of."""
    return [word.lower() for word in _PARTS.findall(name)]


def _defined_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that a file defines; names of others that it only uses are not its own."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[Docstring]:
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            line = node.body[0].lineno
            yield Docstring(kind=_kind(node), line=line, text=text)
        if isinstance(node, ast.Module | ast.ClassDef) or node.name == "__init__":
            yield from _field_docstrings(node.body)


def _field_docstrings(body: Sequence[ast.stmt]) -> Iterator[Docstring]:
    """Yield strings that follow an assignment, as documentation tools read them."""
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.Assign | ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield Docstring(kind="field", line=following.lineno, text=following.value.value)


def _comments(source: str) -> Iterator[Prose]:
    """Yield the comments; lines that follow each other are one text, as a reader takes them."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or tokens[end].start[0] != tokens[end - 1].start[0] + 1:
            lines = [token.string.lstrip("#") for token in tokens[start:end]]
            yield Prose(kind="comment", line=tokens[start].start[0], text="\n".join(lines))
            start = end


def _messages(nodes: Sequence[ast.AST]) -> Iterator[Prose]:
    """Yield the strings below a `raise`, a call of a logger and `warnings.warn`."""
    messages: dict[int, tuple[str, ast.Constant]] = {}
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = "error message"
        elif isinstance(node, ast.Call) and _is_log_call(node):
            kind = "log message"
        else:
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                messages.setdefault(id(part), (kind, part))
    for kind, part in messages.values():
        # The parts of one implicitly joined string are one constant without line breaks.
        yield Prose(kind=kind, line=part.lineno, text=str(part.value))


def _is_log_call(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr in _LOG_METHODS


def _kind(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    if _is_noun(node):
        return "property"
    # A test of the conformance kit states a rule for engines: "Dummy samples change no weight." An
    # imperative would only add "Check that". The other tests have no docstrings.
    return "test" if node.name.startswith("test_") else "function"


def _is_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for properties and pytest fixtures, which readers use as values."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("property" in each or "fixture" in each for each in decorators)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the repository, or the folders that are named; return 1 if there is a fault."""
    chosen = sys.argv[1:] if arguments is None else arguments
    wording = read_wording(ROOT / WORDS)
    # A folder that is named is checked even if it is exempt: to see what is left to rewrite.
    folders = [Path(name).resolve() for name in chosen] or [
        folder
        for pattern in wording.checked
        for folder in sorted(ROOT.glob(pattern))
        if folder.relative_to(ROOT).as_posix() not in wording.exempt
    ]
    pages = [] if chosen else [page for each in wording.pages for page in sorted(ROOT.glob(each))]
    faults = [
        *(line for folder in folders for line in check_folder(folder, wording, root=ROOT)),
        *(line for page in pages for line in check_page(page, wording, root=ROOT)),
    ]
    checked = f"{len(folders)} folders and {len(pages)} pages"
    print("\n".join(faults) or f"wording: {checked} use the words of the style guide")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
