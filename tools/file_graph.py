"""Build the graph of which Python files of the repository import or name which other files.

The packages' part is the import graph of the step `layers`. Files outside of the packages (tests,
tools, benchmarks) are no importable packages, so their imports are resolved here. A file that names
another one in a string counts as its importer, because tests start programs and read data by name.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.layers import build_import_graph

COMMON_NAMES = ("__init__.py", "__main__.py", "conftest.py")
"""File names that say too little: a string with one of them may mean any of several files."""

_DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*")
_MARKS = ("slow", "nightly")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFunction:
    """A test function or method, with its marks as written in the source."""

    __test__ = False  # not a test class, though its name starts like one

    name: str
    """Its part of the node id: `test_a`, or `TestGroup::test_a`."""
    marks: frozenset[str]
    """Subset of `slow` and `nightly` that it carries, also through its class or module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGraph:
    """Importers of each file. Paths are relative to the repository, with slashes."""

    importers: Mapping[str, frozenset[str]]
    """Maps a file to the files that import it."""
    strings: Mapping[str, str]
    """Maps each file outside of the packages to the text of all its strings."""
    tests: Mapping[str, tuple[TestFunction, ...]]
    """Maps each test file to its tests."""

    def find_readers(self, path: str) -> frozenset[str]:
        """Return the files whose strings name a file, as programs and data are named.

        Within its own package a data file is also named by its stem, as in `algorithm=grpo`, and
        recorded data below `tests` by its folder.
        """
        file = PurePosixPath(path)
        if file.name in COMMON_NAMES:
            return frozenset()
        words = {file.name}
        package = find_package(path)
        if package and file.suffix != ".py":
            words |= {file.stem}
            if file.is_relative_to(f"{package}/tests"):
                words |= set(file.relative_to(f"{package}/tests").parts[:1])
        readers = set()
        for reader, text in self.strings.items():
            # Words other than the file's name mean this file only next to it.
            known = words if package and find_package(reader) == package else {file.name}
            if any(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text) for word in known):
                readers.add(reader)
        return frozenset(readers - {path})

    def compute_distances(self, changed: Iterable[str]) -> dict[str, int]:
        """Return how many imports each file is away from the nearest changed file.

        Files that no changed file reaches are left out.
        """
        distances = dict.fromkeys(changed, 0)
        queue = deque(distances)
        # A changed __init__.py runs at the import of every module below it. Elsewhere that is no
        # edge, or each module would depend on whatever its package imports.
        below = {
            path: {
                name
                for name in self.importers
                if path.endswith("/__init__.py")
                and name.startswith(path.removesuffix("__init__.py"))
                and "/src/" in path
            }
            for path in distances
        }
        named = {path: self.find_readers(path) for path in distances}
        while queue:
            path = queue.popleft()
            importers = (
                self.importers.get(path, frozenset())
                | below.get(path, set())
                | named.get(path, frozenset())
            )
            for importer in importers:
                if importer not in distances:
                    distances[importer] = distances[path] + 1
                    queue.append(importer)
        return distances


def find_package(path: str) -> str:
    """Return the folder of the package that holds a file, or an empty string."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) if parts[0] == "packages" and len(parts) > 2 else ""


def is_test_file(path: str) -> bool:
    """Return whether pytest collects a file of this repository."""
    return bool(re.fullmatch(r"(packages/[^/]+|tools)/tests/(.+/)?test_[^/]+\.py", path))


def build_file_graph(root: Path, files: Sequence[str], *, deleted: Sequence[str]) -> FileGraph:
    """Build the graph of a checkout.

    Args:
        root: The repository.
        files: Its Python files, without the ones that git ignores.
        deleted: Python files that the working tree lacks; imports of them are found too.

    Raises:
        SyntaxError: If a file cannot be parsed.
    """
    sources = sorted({root / path.split("/src/")[0] / "src" for path in files if _is_src(path)})
    modules = {_module_name(path): path for path in (*files, *deleted)}
    importers: dict[str, set[str]] = {path: set() for path in modules.values()}
    packages = sorted({name for name, path in modules.items() if _is_src(path) and "." not in name})
    for importer, imported in build_import_graph(packages, sources=sources).items():
        for name in imported:
            if importer in modules and name in modules:
                importers[modules[name]].add(modules[importer])
    # The import graph has no edges to files that are not there.
    removed = {_module_name(path): path for path in deleted if _is_src(path)}
    for path in (path for path in files if removed and _is_src(path)):
        source = ast.parse((root / path).read_text(), filename=path)
        for name in _iterate_imports(ast.walk(source), module=_module_name(path)):
            if name in removed:
                importers[removed[name]].add(path)
    strings, tests = dict[str, str](), dict[str, tuple[TestFunction, ...]]()
    # Test helpers import each other by their bare names, because pytest puts no package above them.
    helpers = {
        (find_package(path), PurePosixPath(path).stem): path
        for path in modules.values()
        if "/tests/" in path and PurePosixPath(path).name not in COMMON_NAMES
    }
    conftests = {str(PurePosixPath(path).parent): path for path in files if _is_conftest(path)}
    for path in (path for path in files if not _is_src(path)):
        tree = ast.parse((root / path).read_text(), filename=path)
        # The expensive part is to visit all nodes, which is done once.
        nodes = [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Constant))
        ]
        strings[path] = "\n".join(_iterate_strings(nodes))
        if is_test_file(path):
            tests[path] = tuple(_iterate_tests(tree.body, prefix="", outer=_module_marks(tree)))
        named = {*_iterate_imports(nodes, module=_module_name(path))}
        # Names in strings: `-m temper_trainer`, monkeypatch.setattr, and programs as text.
        named |= {name for name in _DOTTED.findall(strings[path]) if _is_module(name, modules)}
        for name in named:
            if target := _resolve(name, modules) or helpers.get((find_package(path), name), ""):
                importers[target].add(path)
            if f"{name}.__main__" in modules:
                importers[modules[f"{name}.__main__"]].add(path)
        if "/tests/" in path:
            for folder in PurePosixPath(path).parents:
                if conftest := conftests.get(str(folder)):
                    importers[conftest].add(path)
    return FileGraph(
        importers={path: frozenset(paths - {path}) for path, paths in importers.items()},
        strings=strings,
        tests=tests,
    )


def _is_src(path: str) -> bool:
    return bool(re.match(r"packages/[^/]+/src/", path))


def _is_conftest(path: str) -> bool:
    return PurePosixPath(path).name == "conftest.py"


def _module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    if _is_src(path):
        parts = parts[3:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_module(name: str, modules: Mapping[str, str]) -> bool:
    """Return whether a word of a string names a module, and is no ordinary word like `tools`."""
    target = modules.get(name, "")
    return bool(target) and ("." in name or _is_src(target))


def _resolve(name: str, modules: Mapping[str, str]) -> str:
    """Return the file of the module, or of the nearest package above the name."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return modules.get(name, "")


def _iterate_imports(nodes: Iterable[ast.AST], *, module: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _iterate_strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _module_marks(tree: ast.Module) -> frozenset[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return _find_marks([node.value])
    return frozenset()


def _find_marks(expressions: Iterable[ast.expr]) -> frozenset[str]:
    text = " ".join(ast.unparse(expression) for expression in expressions)
    return frozenset(mark for mark in _MARKS if re.search(rf"\bmark\.{mark}\b", text))


def _iterate_tests(
    body: Iterable[ast.stmt], *, prefix: str, outer: frozenset[str]
) -> Iterator[TestFunction]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            marks = outer | _find_marks(node.decorator_list)
            yield from _iterate_tests(node.body, prefix=f"{prefix}{node.name}::", outer=marks)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            # A mark of one parameter is not a mark of the test.
            own = [item for item in node.decorator_list if "parametrize" not in ast.unparse(item)]
            yield TestFunction(name=prefix + node.name, marks=outer | _find_marks(own))
