"""Change the old imports of a file; all other text, blanks and comments stay.

The standard library's parser says where each name is, and only those places of the text are
replaced. A concrete syntax tree (libcst) took 2.1 s of CPU for a file of 65 KB, because it visits
each node several times in Python; this takes 0.05 s.
"""

import ast
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

from temper_legacy_shim.imports.scopes import CodeNames, names_in
from temper_legacy_shim.imports.successors import Successor, advice_for, is_module, successor_of
from temper_legacy_shim.old_paths import PACKAGE

_OLD_NAME = re.compile(rf"{PACKAGE}(\.\w+)+")
_ANNOTATION = re.compile(r"[\w.\[\], |'\"]+")
# Not str.splitlines(), which also splits at form feeds and Unicode separators, unlike Python's
# parser.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_COMMENT = re.compile(r"#[^\r\n]*")

_ImportNode = ast.Import | ast.ImportFrom
_Moved = dict[str, list[tuple[str, str | None]]]
"""Names to import by their new module, each with the name it is bound to if that is another
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    line: int
    old: str
    new: str
    """``module.name``; empty where it has no successor."""
    what_to_do: str
    """Empty if no work is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    content: bytes
    remarks: tuple[Remark, ...]


class NotPythonError(ValueError):
    """A file that Python cannot parse."""


def change_imports(content: bytes, *, keeps_legacy: bool, is_package: bool = False) -> Changed:
    """Change one file's content.

    Args:
        content: a Python file.
        keeps_legacy: use this package's deprecated classes if it has them.
        is_package: whether it is an ``__init__.py``, whose names other files import: they stay.

    Raises:
        NotPythonError: it can't be parsed; says where.
    """
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        text = content.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's own code
            tree = ast.parse(text)
    # ast.parse raises MemoryError for deeply nested code.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotPythonError(" ".join(str(error).split())[:200]) from error
    names = names_in(tree)
    # Quoted annotations and __all__ refer to names by text, which no edit reaches.
    staying = names.all if is_package else names.fixed | _words_in_texts(names.texts)
    changer = _Changer(_Text(text), names, keeps_legacy=keeps_legacy, staying=staying)
    changer.change(tree)
    remarks = sorted(dict.fromkeys(changer.remarks), key=lambda remark: (remark.line, remark.old))
    return Changed(content=changer.text.result().encode(encoding), remarks=tuple(remarks))


def _words_in_texts(texts: Sequence[ast.Constant]) -> set[str]:
    """Return the words of annotations in quotes and of ``__all__``."""
    values = (str(node.value) for node in texts)
    return {
        word
        for value in values
        if _ANNOTATION.fullmatch(value)
        for word in re.findall(r"\w+", value)
    }


class _Text:
    """A file's text, and replacements of parts of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self._lines = _LINE.findall(text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def position(self, line: int, column: int) -> int:
        """Return the index in the text; the parser counts columns in bytes of UTF-8."""
        content = self._lines[line - 1] if line <= len(self._lines) else ""
        if not content.isascii():
            column = len(content.encode()[:column].decode(errors="ignore"))
        return self._starts[line - 1] + column

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """Return where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.position(node.lineno, node.col_offset), self.position(
            node.end_lineno, node.end_col_offset
        )

    def of(self, node: ast.stmt | ast.expr | ast.alias) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def before(self, node: ast.stmt) -> str:
        return self.text[self._starts[node.lineno - 1] : self.span(node)[0]]

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace a part; parts may not overlap."""
        self._edits.append((start, end, new))

    def result(self) -> str:
        out, at = [], 0
        # In one pass from the start: each edit refers to positions of the old text.
        for start, end, new in sorted(self._edits):
            out += [self.text[at:start], new]
            at = end
        return "".join([*out, self.text[at:]])


class _Changer:
    def __init__(
        self, text: _Text, names: CodeNames, *, keeps_legacy: bool, staying: set[str]
    ) -> None:
        self.text, self.names, self.keeps_legacy, self.staying = text, names, keeps_legacy, staying
        self.remarks: list[Remark] = []
        self._renamed: dict[str, str] = {}
        """Old full names whose uses get this name."""
        self._full: dict[str, dict[str, None]] = {}
        """Imported modules, with the full names of the attributes in use."""

    def change(self, tree: ast.Module) -> None:
        """Look at every import and every use, then replace both."""
        blocks = list(_blocks(tree))
        statements = [
            node
            for block in blocks
            for node in block
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        imported, modules = _old_imports(statements)
        self._full = self._group_by_module(modules)
        for old in imported:
            if (successor := self._successor(old)) is not None:
                self._renamed[old] = self._new_name(old, successor)
        for old in (old for names in self._full.values() for old in names):
            if (successor := self._successor(old)) is not None and old not in self._renamed:
                self._renamed[old] = self._unused_name(old, successor)
        self._change_uses()
        for node in self.names.texts:
            if isinstance(node.value, str) and _OLD_NAME.fullmatch(node.value):
                self.remarks.append(
                    Remark(
                        line=node.lineno,
                        old=node.value,
                        new="",
                        what_to_do="this is a text: change it by hand",
                    )
                )
        for block in blocks:
            self._change_block(block)

    def _successor(self, old: str) -> Successor | None:
        return successor_of(old, keeps_legacy=self.keeps_legacy)

    def _new_name(self, old: str, successor: Successor) -> str:
        """Return the successor's name, or the old one if that is taken or quoted."""
        name, before = successor.target.partition(":")[2], old.rpartition(".")[2]
        if before in self.staying:
            return before
        is_taken = name in self.names.all or name in self._names_of_others(successor)
        return before if is_taken else name

    def _unused_name(self, old: str, successor: Successor) -> str:
        """Return a name for an attribute of a module, which the file had under no name yet.

        The successor's own name may be one of the file: ``hdfs_io.copy`` next to ``import copy``.
        """
        taken = self.names.variables | self._names_of_others(successor)
        module, name = old.split(".")[-2], successor.target.partition(":")[2]
        if name in taken:
            name = f"{module}_{name}"
        while name in taken:
            name += "_"
        return name

    def _names_of_others(self, successor: Successor) -> set[str]:
        return {each for key, each in self._renamed.items() if self._successor(key) != successor}

    def _remark(self, line: int, old: str) -> None:
        successor = self._successor(old)
        new, what_to_do = (
            ("", advice_for(old))
            if successor is None
            else (successor.target.replace(":", "."), successor.how)
        )
        self.remarks.append(Remark(line=line, old=old, new=new, what_to_do=what_to_do))

    # --- uses
    # ----------------------------------------------------------------------------------------------

    def _group_by_module(self, modules: Sequence[str]) -> dict[str, dict[str, None]]:
        """Resolve every use to ``module.name``, by the longest imported module prefix."""
        out: dict[str, dict[str, None]] = {module: {} for module in modules}
        for node, name in self.names.uses:
            matches = max(
                (module for module in modules if name.startswith(f"{module}.")),
                key=len,
                default=None,
            )
            if matches is not None and isinstance(node, ast.Attribute):
                attribute = name[len(matches) + 1 :].partition(".")[0]
                if f"{matches}.{attribute}" not in modules and not any(
                    each.startswith(f"{matches}.{attribute}.") for each in modules
                ):
                    out[matches][f"{matches}.{attribute}"] = None
        return out

    def _change_uses(self) -> None:
        of_modules = {old for names in self._full.values() for old in names}
        for node, old in self.names.uses:
            if old not in self._renamed:
                continue
            start, end = self.text.span(node)
            if isinstance(node, ast.Attribute) and old in of_modules:
                self._remark(node.lineno, old)
                self.text.replace(start, end, self._renamed[old])
            elif (
                isinstance(node, ast.Name)
                and old.rpartition(".")[2] == node.id
                and self._renamed[old] != node.id
            ):
                self.text.replace(start, end, self._renamed[old])

    # --- imports
    # ----------------------------------------------------------------------------------------------

    def _change_block(self, block: Sequence[ast.stmt]) -> None:
        """Replace the imports of a block; statements on the same line get lines of their own."""
        for line in _on_one_line(block):
            changed = [
                self._changed_import(node)
                if isinstance(node, (ast.Import, ast.ImportFrom))
                else None
                for node in line
            ]
            if all(new is None for new in changed):
                continue
            indent = self.text.before(line[0])
            is_suite = bool(indent.strip())  # on the line of its `if` or `try`
            separator = "; " if is_suite else self.text.newline + indent
            above: list[str] = []
            for number, (node, new) in enumerate(zip(line, changed, strict=True)):
                start, end = self.text.span(node)
                if new is not None:
                    above += _lost_comments(self.text.of(node), new)
                    self.text.replace(start, end, separator.join(new))
                if number and not is_suite:
                    self.text.replace(self.text.span(line[number - 1])[1], start, separator)
            if above and not is_suite:
                start = self.text.span(line[0])[0]
                self.text.replace(start, start, separator.join(above) + separator)

    def _changed_import(self, node: _ImportNode) -> list[str] | None:
        """Return the statements that replace an import; None if it stays."""
        moved: _Moved = {}
        kept = (
            self._kept_of_import(node, moved)
            if isinstance(node, ast.Import)
            else self._kept_of_from(node, moved)
        )
        if not moved:
            return None
        statements = (
            [self._without(node, [alias for alias in node.names if alias not in kept])]
            if kept
            else []
        )
        return [*statements, *(_from_import(target, names) for target, names in moved.items())]

    def _kept_of_from(self, node: ast.ImportFrom, moved: _Moved) -> list[ast.alias]:
        """Return the names of a ``from`` import that stay; names with a successor go to `moved`."""
        module = node.module or ""
        if node.level or module.partition(".")[0] != PACKAGE:
            return node.names
        if node.names[0].name == "*":
            advice = "import the names that you use, one by one, and run this again"
            self.remarks.append(
                Remark(line=node.lineno, old=f"{module}.*", new="", what_to_do=advice)
            )
            return node.names
        kept: list[ast.alias] = []
        for alias in node.names:
            old = f"{module}.{alias.name}"
            if old in self._full:
                kept += [alias] if self._stays(node, old, moved) else []
                continue
            self._remark(node.lineno, old)
            successor = self._successor(old)
            if successor is None:
                kept.append(alias)
                continue
            target, _, name = successor.target.partition(":")
            bound = alias.asname or self._renamed[old]
            moved.setdefault(target, []).append((name, None if bound == name else bound))
        return kept

    def _kept_of_import(self, node: ast.Import, moved: _Moved) -> list[ast.alias]:
        return [
            alias
            for alias in node.names
            if alias.name.partition(".")[0] != PACKAGE or self._stays(node, alias.name, moved)
        ]

    def _stays(self, node: ast.stmt, module: str, moved: _Moved) -> bool:
        """Check if an old module is still needed, and add successors to `moved`."""
        uses = self._full.get(module, {})
        stays = [old for old in uses if old not in self._renamed]
        for old in uses:
            successor = self._successor(old)
            if successor is not None:
                target, _, name = successor.target.partition(":")
                bound = self._renamed[old]
                moved.setdefault(target, []).append((name, None if bound == name else bound))
        for old in (stays or [module]) if stays or not uses else []:
            self._remark(node.lineno, old)
        return bool(stays) or not uses

    def _without(self, node: _ImportNode, gone: Sequence[ast.alias]) -> str:
        """Remove names from an import statement, and keep the rest as it is."""
        start, end = self.text.span(node)
        part = _Text(self.text.text[start:end])
        spans = [(first - start, last - start) for first, last in map(self.text.span, node.names)]
        removed = [number for number, alias in enumerate(node.names) if alias in gone]
        lines = [
            line for number in removed if (line := _own_line(part.text, *spans[number])) is not None
        ]
        if len(lines) == len(removed):
            for first, last in lines:
                part.replace(first, last, "")
            return part.result()
        kept = [number for number in range(len(spans)) if number not in removed]
        for before, after in zip([-1, *kept], [*kept, len(spans)], strict=True):
            if after == before + 1:
                continue
            if after < len(spans):
                part.replace(spans[before + 1][0], spans[after][0], "")
            else:
                part.replace(spans[before][1], spans[-1][1], "")
        return part.result()


def _old_imports(statements: Sequence[_ImportNode]) -> tuple[list[str], list[str]]:
    """Return old names that are imported from modules, and old modules that are imported whole."""
    names: list[str] = []
    modules: list[str] = []
    for node in statements:
        if isinstance(node, ast.Import):
            modules += [
                alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE
            ]
        elif (
            not node.level
            and (node.module or "").partition(".")[0] == PACKAGE
            and node.names[0].name != "*"
        ):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                (modules if is_module(name) else names).append(name)
    return names, modules


def _blocks(tree: ast.Module) -> Iterator[Sequence[ast.stmt]]:
    # Not ast.walk(), which visits expressions, too: they hold no statements.
    pending: list[ast.AST] = [tree]
    for node in pending:
        for name in ("body", "orelse", "finalbody"):
            block: list[ast.stmt] = getattr(node, name, [])
            yield block
            pending += block
        pending += [*getattr(node, "handlers", []), *getattr(node, "cases", [])]


def _on_one_line(block: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield groups of statements that share a line."""
    group: list[ast.stmt] = []
    for node in block:
        if group and node.lineno != group[-1].end_lineno:
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _own_line(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return a name's line, with comma and comment, if the name is alone on it."""
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1
    is_single = (
        not text[first:start].strip()
        and re.fullmatch(r"\s*,?\s*(#.*)?", text[end:last].rstrip("\r\n")) is not None
    )
    return (first, last) if "(" in text and first and last and is_single else None


def _lost_comments(old: str, new: Sequence[str]) -> list[str]:
    """Return the comments of an import statement that none of its successors has."""
    lost = _COMMENT.findall(old)
    for comment in (comment for statement in new for comment in _COMMENT.findall(statement)):
        lost.remove(comment)
    return [comment.rstrip() for comment in lost]


def _from_import(target: str, names: list[tuple[str, str | None]]) -> str:
    shown = ", ".join(
        name if alias is None else f"{name} as {alias}"
        for name, alias in dict.fromkeys(sorted(names, key=str))
    )
    return f"from {target} import {shown}"
