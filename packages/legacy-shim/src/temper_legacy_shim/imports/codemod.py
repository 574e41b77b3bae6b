"""Change the old imports of one file, and nothing else in it: libcst keeps every blank and comment."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider

from temper_legacy_shim.imports.successors import Successor, advice_for, is_module, successor_of
from temper_legacy_shim.old_paths import PACKAGE

_OLD_NAME = re.compile(rf"{PACKAGE}(\.\w+)+")
_ANNOTATION = re.compile(r"[\w.\[\], |'\"]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One old name in a file."""

    line: int
    old: str
    new: str
    """``module.name``; empty where it has no successor."""
    what_to_do: str
    """Empty where nothing is left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A file after the change."""

    content: bytes
    remarks: tuple[Remark, ...]
    """By line."""


class NotPythonError(ValueError):
    """A file that libcst can't parse."""


def change_imports(content: bytes, *, keeps_legacy: bool, is_package: bool = False) -> Changed:
    """Change one file's content.

    Args:
        content: a Python file.
        keeps_legacy: use this package's deprecated classes where it has them.
        is_package: whether it is an ``__init__.py``, whose names other files import: they stay.

    Raises:
        NotPythonError: it can't be parsed; says where.
    """
    try:
        module = cst.parse_module(content)
    except (cst.ParserSyntaxError, UnicodeDecodeError, RecursionError) as error:
        raise NotPythonError(" ".join(str(error).split())[:200]) from error
    wrapper = MetadataWrapper(module)
    names = _names_in(module)
    changer = _Changer(keeps_legacy=keeps_legacy, taken=names.all, staying=names.all if is_package else names.in_texts)
    changed = wrapper.visit(changer)
    remarks = sorted(dict.fromkeys(changer.remarks), key=lambda remark: (remark.line, remark.old))
    return Changed(content=changed.bytes, remarks=tuple(remarks))


@dataclass(frozen=True, slots=True)
class _Names:
    """Names that occur in a file."""

    all: frozenset[str]
    """So that a new one does not hide one of them."""
    in_texts: frozenset[str]
    """Of annotations in quotes and of ``__all__``."""


def _names_in(module: cst.Module) -> _Names:
    found: set[str] = set()
    quoted: set[str] = set()

    class Collector(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            found.add(node.value)

        def visit_SimpleString(self, node: cst.SimpleString) -> None:
            value = node.evaluated_value
            if isinstance(value, str) and _ANNOTATION.fullmatch(value):
                quoted.update(re.findall(r"\w+", value))

    module.visit(Collector())
    return _Names(frozenset(found), frozenset(quoted))


class _Changer(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, *, keeps_legacy: bool, taken: frozenset[str], staying: frozenset[str]) -> None:
        super().__init__()
        self.keeps_legacy, self.taken, self.staying = keeps_legacy, taken, staying
        self.remarks: list[Remark] = []
        self._renamed: dict[str, str] = {}
        """Old full names whose uses get this name."""
        self._imported: list[tuple[str, set[str], set[str]]] = []
        """Modules imported whole: the name they are bound to, successors of uses, names that stay."""

    # --- what is used -------------------------------------------------------------------------------------------------

    def visit_Module(self, node: cst.Module) -> None:
        """Look at every import and every use of a module before anything changes."""
        imports, uses = _Imports(), _Uses(self)
        node.visit(imports)
        node.visit(uses)
        for old in imports.names:
            successor = self._successor(old)
            if successor is not None:
                self._renamed[old] = self._new_name(old, successor)
        self._whole = uses.by_module(imports.modules)
        for names in self._whole.values():
            for old in names:
                successor = self._successor(old)
                if successor is not None:
                    self._renamed[old] = self._new_name(old, successor)

    def _successor(self, old: str) -> Successor | None:
        return successor_of(old, keeps_legacy=self.keeps_legacy)

    def _new_name(self, old: str, successor: Successor) -> str:
        """The name to use from now on: the successor's own, or the old one where that is taken, or where a text names the old one."""
        name, before = successor.target.partition(":")[2], old.rpartition(".")[2]
        if before in self.staying:
            return before
        others = {each for key, each in self._renamed.items() if self._successor(key) != successor}
        return name if name == before or (name not in self.taken and name not in others) else before

    def _line(self, node: cst.CSTNode) -> int:
        position = self.get_metadata(PositionProvider, node)
        return int(position.start.line)

    def _remark(self, node: cst.CSTNode, old: str) -> None:
        successor = self._successor(old)
        if successor is None:
            self.remarks.append(Remark(line=self._line(node), old=old, new="", what_to_do=advice_for(old)))
        else:
            self.remarks.append(Remark(line=self._line(node), old=old, new=successor.target.replace(":", "."), what_to_do=successor.how))

    # --- uses ---------------------------------------------------------------------------------------------------------

    def _old_of(self, node: cst.CSTNode) -> str | None:
        names = self.get_metadata(QualifiedNameProvider, node, set())
        return next((each.name for each in names if each.name in self._renamed), None)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        old = self._old_of(original_node)
        if old is None or old.rpartition(".")[2] != original_node.value:
            return updated_node
        return updated_node.with_changes(value=self._renamed[old])

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        old = self._old_of(original_node)
        if old is None or not any(old in names for names in self._whole.values()):
            return updated_node
        self._remark(original_node, old)
        return cst.Name(self._renamed[old], lpar=updated_node.lpar, rpar=updated_node.rpar)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        """Paths in texts, as ``importlib`` and mocks take them, are for a person."""
        value = node.evaluated_value
        if isinstance(value, str) and _OLD_NAME.fullmatch(value):
            self.remarks.append(Remark(line=self._line(node), old=value, new="", what_to_do="this is a text: change it by hand"))

    # --- imports ------------------------------------------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        out: list[cst.BaseSmallStatement] = []
        is_changed = False
        for small, updated in zip(original_node.body, updated_node.body, strict=True):
            new = self._changed_import(small)
            is_changed = is_changed or new is not None
            out.extend([updated] if new is None else new)
        if not is_changed:
            return updated_node
        lost = _comments_of(original_node.body) - _comments_of(out)
        above = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in lost.elements()]
        lines: list[cst.BaseStatement] = []
        for number, small in enumerate(out):
            body = [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]
            is_last = number == len(out) - 1
            lines.append(
                cst.SimpleStatementLine(
                    body=body,
                    leading_lines=[*updated_node.leading_lines, *above] if number == 0 else (),
                    trailing_whitespace=updated_node.trailing_whitespace if is_last else cst.TrailingWhitespace(),
                )
            )
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite) -> cst.BaseSuite:
        """Statements on the line of their ``if`` or ``try`` stay there."""
        changed = [(small, self._changed_import(small)) for small in original_node.body]
        if all(new is None for _, new in changed):
            return updated_node
        pairs = zip(changed, updated_node.body, strict=True)
        out = [each for (_, new), updated in pairs for each in ([updated] if new is None else new)]
        return updated_node.with_changes(body=[small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in out])

    def _changed_import(self, small: cst.BaseSmallStatement) -> list[cst.BaseSmallStatement] | None:
        if isinstance(small, cst.ImportFrom):
            return self._changed_from(small)
        if isinstance(small, cst.Import):
            return self._changed_whole(small)
        return None

    def _changed_from(self, node: cst.ImportFrom) -> list[cst.BaseSmallStatement] | None:
        module = _module_of(node)
        if module is None or module.partition(".")[0] != PACKAGE:
            return None
        if isinstance(node.names, cst.ImportStar):
            self.remarks.append(
                Remark(
                    line=self._line(node),
                    old=f"{module}.*",
                    new="",
                    what_to_do="import the names that you use, one by one, and run this again",
                )
            )
            return None
        kept: list[cst.ImportAlias] = []
        moved: dict[str, list[tuple[str, str | None]]] = {}
        for alias in node.names:
            old = f"{module}.{alias.evaluated_name}"
            if old in self._whole:
                kept += [alias] if self._stays(node, old, moved) else []
                continue
            self._remark(node, old)
            successor = self._successor(old)
            if successor is None:
                kept.append(alias)
                continue
            target, _, name = successor.target.partition(":")
            bound = alias.evaluated_alias or self._renamed[old]
            moved.setdefault(target, []).append((name, None if bound == name else bound))
        if not moved:
            return None
        statements: list[cst.BaseSmallStatement] = []
        if kept:
            statements.append(node.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]))
        return [*statements, *(_from_import(target, names) for target, names in moved.items())]

    def _stays(self, node: cst.CSTNode, module: str, moved: dict[str, list[tuple[str, str | None]]]) -> bool:
        """Whether an old module is still needed; successors of what is used of it are added to `moved`."""
        uses = self._whole.get(module, {})
        stays = [old for old in uses if old not in self._renamed]
        for old in uses:
            successor = self._successor(old)
            if successor is not None:
                target, _, name = successor.target.partition(":")
                bound = self._renamed[old]
                moved.setdefault(target, []).append((name, None if bound == name else bound))
        for old in (stays or [module]) if stays or not uses else []:
            self._remark(node, old)
        return bool(stays) or not uses

    def _changed_whole(self, node: cst.Import) -> list[cst.BaseSmallStatement] | None:
        kept: list[cst.ImportAlias] = []
        moved: dict[str, list[tuple[str, str | None]]] = {}
        for alias in node.names:
            module = alias.evaluated_name
            if module.partition(".")[0] != PACKAGE:
                kept.append(alias)
                continue
            kept += [alias] if self._stays(node, module, moved) else []
        if not moved:
            return None
        statements: list[cst.BaseSmallStatement] = []
        if kept:
            statements.append(node.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]))
        return [*statements, *(_from_import(target, names) for target, names in moved.items())]


class _Imports(cst.CSTVisitor):
    """Old names that are imported from modules, and old modules that are imported whole."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.modules: list[str] = []

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = _module_of(node)
        if module is not None and module.partition(".")[0] == PACKAGE and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                name = f"{module}.{alias.evaluated_name}"
                (self.modules if is_module(name) else self.names).append(name)

    def visit_Import(self, node: cst.Import) -> None:
        self.modules += [alias.evaluated_name for alias in node.names if alias.evaluated_name.partition(".")[0] == PACKAGE]


class _Uses(cst.CSTVisitor):
    """Full names of attributes of old modules."""

    def __init__(self, changer: _Changer) -> None:
        super().__init__()
        self._changer = changer
        self._names: list[str] = []

    def visit_Attribute(self, node: cst.Attribute) -> None:
        names = self._changer.get_metadata(QualifiedNameProvider, node, set())
        self._names += [each.name for each in names if each.name.startswith(f"{PACKAGE}.")]

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def by_module(self, modules: Sequence[str]) -> dict[str, dict[str, None]]:
        """``module.name`` of every use, by the longest imported module that it begins with."""
        out: dict[str, dict[str, None]] = {module: {} for module in modules}
        for name in self._names:
            found = max((module for module in modules if name.startswith(f"{module}.")), key=len, default=None)
            if found is not None:
                attribute = name[len(found) + 1 :].partition(".")[0]
                if f"{found}.{attribute}" not in modules and not any(each.startswith(f"{found}.{attribute}.") for each in modules):
                    out[found][f"{found}.{attribute}"] = None
        return out


def _comments_of(statements: Sequence[cst.BaseSmallStatement]) -> Counter[str]:
    """Comments inside statements: between the parentheses of an import."""
    found: Counter[str] = Counter()

    class Collector(cst.CSTVisitor):
        def visit_Comment(self, node: cst.Comment) -> None:
            found[node.value] += 1

    for statement in statements:
        statement.visit(Collector())
    return found


def _module_of(node: cst.ImportFrom) -> str | None:
    """The module of an absolute ``from`` import."""
    return None if node.relative or node.module is None else get_full_name_for_node(node.module)


def _from_import(target: str, names: list[tuple[str, str | None]]) -> cst.ImportFrom:
    shown = ", ".join(name if alias is None else f"{name} as {alias}" for name, alias in dict.fromkeys(sorted(names, key=str)))
    statement = cst.ensure_type(cst.parse_statement(f"from {target} import {shown}\n"), cst.SimpleStatementLine)
    return cst.ensure_type(statement.body[0], cst.ImportFrom)
