"""Check import rules that import-linter cannot express.

import-linter treats a third-party package as one unit, and has rules only for what is forbidden.
This checks who may import sub-packages of others (torch.distributed, megatron.bridge), that the
core of engine-api imports only what is listed, and that no files import each other in a cycle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import grimp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.optional_imports import NEEDS_EXTRA

SOURCES = "packages/*/src"

KIT = "temper_engine_api.conformance"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdPartyRule:
    """A third-party module, and our modules that may import it, with their submodules."""

    module: str
    importers: tuple[str, ...]


ENGINES = ("temper_engine_fsdp", "temper_engine_megatron")

SHIM_WITH_TORCH = (*NEEDS_EXTRA["legacy-shim"], "temper_legacy_shim.old_helpers")
"""Modules of legacy-shim that need an extra; functions of others must not import torch either.

The old helpers are imported by users' data scripts, which have torch if they use its tensors.
"""

WITH_TORCH = ("temper_engine_api", *ENGINES, "temper_trainer", *SHIM_WITH_TORCH)

THIRD_PARTY_RULES = (
    ThirdPartyRule(
        module="torch.distributed",
        importers=(
            *ENGINES,
            KIT,
            "temper_engine_api.checkpoint",
            "temper_engine_api.distributed.checkpoint_part",
            "temper_engine_api.distributed.process_group",
            "temper_engine_api.distributed.rank_connections",
            "temper_engine_api.distributed.rank_failures",
            "temper_engine_api.distributed.rendezvous",
            "temper_trainer.rollout.weight_channel",
        ),
    ),
    ThirdPartyRule(
        module="peft",
        importers=(
            "temper_engine_fsdp.training.lora_adapter",
            "temper_engine_fsdp.training.lora_targets",
            "temper_engine_megatron.adapter.adapter_plan",
            KIT,
        ),
    ),
    ThirdPartyRule(module="megatron.bridge", importers=("temper_engine_megatron.bridge_compat",)),
    # A separate training program, whose requirements no package declares.
    ThirdPartyRule(module="megatron.bridge.training", importers=()),
    # torch itself requires fsspec; only copies of checkpoints go through it.
    ThirdPartyRule(
        module="fsspec",
        importers=(
            "temper_engine_api.checkpoint.remote_copy",
            KIT,
            "temper_trainer",
            "temper_legacy_shim",
        ),
    ),
    # The one place that names the algorithm of checksums.
    ThirdPartyRule(module="blake3", importers=("temper_engine_api.checksums",)),
    ThirdPartyRule(module="vllm", importers=("temper_trainer.rollout.vllm",)),
    # import-linter checks only import statements, and only those of the trainer and the engines.
    ThirdPartyRule(module="ray", importers=("temper_trainer.runtime",)),
    ThirdPartyRule(module="torch", importers=WITH_TORCH),
    ThirdPartyRule(module="transformers", importers=WITH_TORCH),
)

_RULED_MODULES = frozenset(rule.module for rule in THIRD_PARTY_RULES)

CORE = "temper_engine_api"
CORE_MAY_IMPORT = (CORE, "blake3", "torch", "typing_extensions", "fsspec")

EXEMPT_FROM_CYCLES: Mapping[str, str] = {}
"""Packages whose files may import each other in a cycle, and until when."""


def check_imports(module: str, source: str) -> list[str]:
    """Check the imports of one module; return one line for each fault."""
    faults = []
    for line, name in sorted(set(_iterate_imports(ast.parse(source)))):
        faults += [
            f"{module}:{line} imports {name}: "
            f"{_describe_importers(rule.importers)} may import {rule.module}"
            for rule in THIRD_PARTY_RULES
            if _is_within(name, rule.module)
            and not any(_is_within(module, importer) for importer in rule.importers)
        ]
        if _is_within(module, CORE) and not _is_within(module, KIT):
            root = name.partition(".")[0]
            if root not in CORE_MAY_IMPORT and root not in sys.stdlib_module_names:
                faults.append(
                    f"{module}:{line} imports {name}: {CORE} may import torch, blake3, "
                    f"typing_extensions and the standard library; only {KIT} may import more"
                )
    return faults


def build_import_graph(
    packages: Sequence[str], *, sources: Sequence[Path] = ()
) -> dict[str, set[str]]:
    """Return which files of these packages each file imports.

    Imports in functions, for type checkers and by import_module() with a literal name count: they
    hide a cycle and do not remove it.

    Args:
        packages: Names of packages.
        sources: Folders in which to look for them before `sys.path`.
    """
    before = list(sys.path)
    # grimp imports no package, but it looks for them where Python would.
    sys.path[:0] = map(str, sources)
    try:
        return _build_import_graph(packages)
    finally:
        sys.path[:] = before


def _build_import_graph(packages: Sequence[str]) -> dict[str, set[str]]:
    built = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    graph = {module: built.find_modules_directly_imported_by(module) for module in built.modules}
    # grimp reads import statements only.
    for package in packages:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*.py"):
            # Reading a syntax tree takes long, and few files have such a call.
            if "import_module" not in (text := path.read_text()):
                continue
            calls = _iterate_import_calls(ast.parse(text))
            graph[_module_name(path, folder.parent)] |= {name for _, name in calls if name in graph}
    return graph


def find_cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return import cycles, each as a path that starts and ends with the same module.

    Breaking one import of every cycle returned leaves a graph without cycles.
    """
    remaining = {module: set(imported) for module, imported in sorted(graph.items())}
    cycles = []
    while True:
        try:
            TopologicalSorter(remaining).prepare()
        except CycleError as error:
            # graphlib lists the imported module before the one that imports it.
            cycle = list(reversed(error.args[1]))
            cycles.append(cycle)
            remaining[cycle[0]].discard(cycle[1])
        else:
            return cycles


def check_cycles(graph: Mapping[str, Collection[str]], exempt: Collection[str]) -> list[str]:
    """Report cycles outside the exempt packages, and exemptions that are no longer needed."""
    cycles = find_cycles(graph)
    exempted = {
        package: [cycle for cycle in cycles if all(_is_within(name, package) for name in cycle)]
        for package in exempt
    }
    faults = [
        f"import cycle: {' imports '.join(cycle)}. Move what they have in common into one of them, "
        "or into a third file"
        for cycle in cycles
        if not any(cycle in package_cycles for package_cycles in exempted.values())
    ]
    faults += [
        f"{package} has no import cycle: delete its line in EXEMPT_FROM_CYCLES (tools/layers.py)"
        for package, package_cycles in exempted.items()
        if not package_cycles and any(_is_within(module, package) for module in graph)
    ]
    return faults


def _describe_importers(importers: Sequence[str]) -> str:
    return f"only {', '.join(importers)}" if importers else "no module"


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _iterate_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each imported module with its line, also those reached through a dotted name.

    Imports inside functions count.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            # In `from torch import distributed` the imported name is the sub-package.
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if name in _RULED_MODULES)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in _RULED_MODULES:
            yield node.lineno, ast.unparse(node)
    yield from _iterate_import_calls(tree)


def _iterate_import_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each literal name passed to import_module(), with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
        ):
            names = (*node.args[:1], *(item.value for item in node.keywords if item.arg == "name"))
            for name in names:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield node.lineno, name.value


def _module_name(path: Path, source_root: Path) -> str:
    parts = path.relative_to(source_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all packages of a repository, this one by default; return 1 if there is a fault."""
    chosen = sys.argv[1:] if arguments is None else arguments
    root = Path(chosen[0]) if chosen else Path(__file__).resolve().parent.parent
    files = [
        (path, source_root)
        for source_root in sorted(root.glob(SOURCES))
        for path in source_root.rglob("*.py")
    ]
    if not files:
        print(f"layers: no Python file matches {root}/{SOURCES}: give the repository's root")
        return 1
    faults = [
        line
        for path, top in sorted(files)
        for line in check_imports(_module_name(path, top), path.read_text())
    ]
    sources = sorted({top for _, top in files})
    packages = sorted({init.parent.name for top in sources for init in top.glob("*/__init__.py")})
    faults += check_cycles(build_import_graph(packages, sources=sources), EXEMPT_FROM_CYCLES)
    print("\n".join(faults) or f"layers: {len(files)} modules keep the import rules")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
