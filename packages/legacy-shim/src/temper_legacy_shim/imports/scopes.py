"""Resolve the old names that each name in a file stands for: scopes as in Python's reference."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from temper_legacy_shim.old_paths import PACKAGE

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class _Scope:
    """One module, class, function or comprehension."""

    parent: "_Scope | None"
    is_class: bool = False
    imported: dict[str, set[str]] = field(default_factory=dict)
    """Names bound by imports, with the full name of each import."""
    bound: set[str] = field(default_factory=set)
    """Names bound in any way."""
    elsewhere: dict[str, "_Scope"] = field(default_factory=dict)
    """Names that are declared global or nonlocal."""

    def find(self, name: str) -> str | None:
        """Return the full old name a name stands for here; None if several imports bind it."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.elsewhere:
                return scope.elsewhere[name].find(name)
            if name in scope.bound and (not scope.is_class or scope is self):
                full, *others = scope.imported.get(name, {""})
                return full if not others and full.partition(".")[0] == PACKAGE else None
            scope = scope.parent
        return None


@dataclass(slots=True, kw_only=True)
class CodeNames:
    uses: list[tuple[ast.Name | ast.Attribute, str]]
    """Expressions by the old name they stand for, longest part first."""
    all: set[str]
    variables: set[str]
    """Identifiers without those that only follow a dot."""
    fixed: set[str]
    """Identifiers that cannot get another name: defined, declared, or used inside f-strings."""
    texts: list[ast.Constant]


def names_in(tree: ast.Module) -> CodeNames:
    """Resolve the names of a file by scope."""
    collector = _Collector()
    collector.visit_block(tree, _Scope(parent=None))
    names = CodeNames(
        uses=[],
        all=collector.all | collector.variables,
        variables=collector.variables,
        fixed=collector.fixed,
        texts=collector.texts,
    )
    for node, scope, in_text in collector.expressions:
        chain = list(_chain(node))
        root = chain[-1]
        full = scope.find(root.id) if isinstance(root, ast.Name) else None
        if full is None or not isinstance(root, ast.Name):
            continue
        if in_text:
            names.fixed.add(root.id)
        result: list[tuple[ast.Name | ast.Attribute, str]] = []
        for part in reversed(chain):
            full = f"{full}.{part.attr}" if isinstance(part, ast.Attribute) else full
            result.append((part, full))
        names.uses.extend(reversed(result))
    return names


def _chain(node: ast.Name | ast.Attribute) -> Iterator[ast.Name | ast.Attribute]:
    """Yield ``a.b.c``, ``a.b`` and ``a``; without a final name, an attribute comes last."""
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        yield part
        part = part.value
    if isinstance(part, ast.Name):
        yield part


class _Collector:
    """Walk a tree once: bindings of each scope, and expressions with the scope they are in."""

    def __init__(self) -> None:
        self.expressions: list[tuple[ast.Name | ast.Attribute, _Scope, bool]] = []
        self.all: set[str] = set()
        self.variables: set[str] = set()
        self.fixed: set[str] = set()
        self.texts: list[ast.Constant] = []
        self._is_in_text = False

    def visit_block(self, node: ast.AST, scope: _Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child, scope)

    def visit(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            self._expression(node, scope)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                self.texts.append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope)
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._definition(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            self._comprehension(node, scope)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            self._declaration(node, scope)
        elif isinstance(node, ast.JoinedStr):
            before, self._is_in_text = self._is_in_text, True
            self.visit_block(node, scope)
            self._is_in_text = before
        else:
            self._fix_names(node, scope)
            self.visit_block(node, scope)

    def _expression(self, node: ast.Name | ast.Attribute, scope: _Scope) -> None:
        part: ast.expr = node
        while isinstance(part, ast.Attribute):
            self.all.add(part.attr)
            part = part.value
        if isinstance(part, ast.Name):
            self.variables.add(part.id)
            if not isinstance(part.ctx, ast.Load):
                scope.bound.add(part.id)
            self.expressions.append((node, scope, self._is_in_text))
        else:
            self.visit(part, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: _Scope) -> None:
        module = "" if isinstance(node, ast.Import) else ("." * node.level + (node.module or ""))
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            full = f"{module}.{alias.name}" if module else alias.name if alias.asname else name
            self.all.update(alias.name.split("."))
            self.variables.add(name)
            scope.bound.add(name)
            imports = scope.imported.setdefault(name, set())
            imports.add(full)
            # Such as in two branches, or after ImportError: which of them ran is not known here.
            if len(imports) > 1:
                self.fixed.add(name)

    def _definition(self, node: ast.AST, scope: _Scope) -> None:
        """Enter a function or class; its decorators, bases and defaults belong outside it."""
        outside: list[ast.AST] = []  # is evaluated around the definition
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._fix(node.name, scope)
            outside += node.decorator_list
        if isinstance(node, ast.ClassDef):
            outside += [*node.bases, *node.keywords]
            inside: list[ast.AST] = list(node.body)
        else:
            assert isinstance(node, _FUNCTIONS)
            arguments = node.args
            outside += [
                *arguments.defaults,
                *(each for each in arguments.kw_defaults if each is not None),
            ]
            inside = list(node.body) if isinstance(node.body, list) else [node.body]
        own = _Scope(parent=scope, is_class=isinstance(node, ast.ClassDef))
        if isinstance(node, _FUNCTIONS):
            every = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            for argument in filter(None, every):
                self._fix(argument.arg, own)
                outside += [argument.annotation] if argument.annotation is not None else []
            outside += (
                [node.returns]
                if not isinstance(node, ast.Lambda) and node.returns is not None
                else []
            )
        for child in outside:
            self.visit(child, scope)
        for child in inside:
            self.visit(child, own)

    def _comprehension(self, node: ast.AST, scope: _Scope) -> None:
        own = _Scope(parent=scope)
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        # Python evaluates only the first iterable outside of the comprehension's own scope.
        self.visit(generators[0].iter, scope)
        for child in ast.iter_child_nodes(node):
            for part in (
                ast.iter_child_nodes(child) if isinstance(child, ast.comprehension) else [child]
            ):
                if part is not generators[0].iter:
                    self.visit(part, own)

    def _declaration(self, node: ast.Global | ast.Nonlocal, scope: _Scope) -> None:
        target = scope.parent or scope
        # global jumps to the module, nonlocal to the next function.
        while isinstance(node, ast.Global) and target.parent is not None:
            target = target.parent
        for name in node.names:
            self.variables.add(name)
            self.fixed.add(name)
            if target is not scope:
                scope.elsewhere[name] = target
                target.bound.add(name)

    def _fix_names(self, node: ast.AST, scope: _Scope) -> None:
        """Note names of exceptions, patterns and keywords a node binds or mentions."""
        for name in (getattr(node, attribute, None) for attribute in ("name", "rest")):
            if isinstance(name, str):
                self._fix(name, scope)
        if isinstance(node, ast.keyword) and node.arg is not None:
            self.all.add(node.arg)

    def _fix(self, name: str, scope: _Scope) -> None:
        self.variables.add(name)
        scope.bound.add(name)
        if name in scope.imported or scope.parent is None:
            self.fixed.add(name)
