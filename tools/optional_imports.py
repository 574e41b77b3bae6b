"""Find modules that can be imported only with an extra, and imports that no package declares.

`nox -s isolated` imports all modules of a wheel without its extras, except those in NEEDS_EXTRA. A
test compares that table with the sources, which are parsed and not imported.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement

NEEDS_EXTRA: dict[str, tuple[str, ...]] = {
    "engine-api": ("temper_engine_api.conformance",),
    "engine-fsdp": ("temper_engine_fsdp.training.lora_adapter",),
    "legacy-shim": tuple(
        f"temper_legacy_shim.{module}"
        for module in (
            "checkpoints",
            "data_proto",
            "numerics",
            "old_algorithms",
            "old_reward_models",
            "old_tools",
            "workers",
        )
    ),
    "trainer": (
        *(
            f"temper_trainer.runtime.ray.{module}"
            for module in (
                "ray_calls",
                "ray_replica",
                "ray_runtime",
                "ray_sampler",
                "ray_verification",
                "ray_worker_group",
            )
        ),
        *(f"temper_trainer.rollout.vllm.{module}" for module in ("vllm_engine", "weight_transfer")),
    ),
}
"""Modules and packages that can be imported only with an extra."""

_IMPORTED_AS = {
    "hydra-core": "hydra",
    "megatron-core": "megatron",
    "mlflow-skinny": "mlflow",
    "pyyaml": "yaml",
}
"""Module of a distribution whose names differ by more than underscores."""

_COMES_ALONG = {"engine-api": {"fsspec"}, "engine-fsdp": {"huggingface_hub"}}
"""Modules that a package imports and torch or transformers installs.

The module that uses fsspec reports if it is missing; of huggingface_hub only an exception is used,
which transformers' configurations raise.
"""


def find_modules_needing_extra(package: Path) -> set[str]:
    """Return the modules whose import fails if no extra of the package is installed."""
    always, optional = _declared(package)
    top = _import_name(package)
    imports = {name: set(_at_import(tree.body)) for name, tree in _modules(package)}
    return {
        name
        for name in imports
        if any(_top(each) in optional - always - {top} for each in _reached(name, imports))
    }


def find_undeclared_imports(package: Path) -> list[str]:
    """Return `module: import` for each import that neither the package nor its extras declare."""
    always, optional = _declared(package)
    known = (
        always
        | optional
        | {_import_name(package), *sys.stdlib_module_names, *_COMES_ALONG.get(package.name, ())}
    )
    found = []
    for name, tree in _modules(package):
        for node in ast.walk(tree):
            found += [f"{name}: {_top(each)}" for each in _named(node) if _top(each) not in known]
    return sorted(set(found))


def drop_submodules(modules: Iterable[str], tops: Iterable[str]) -> set[str]:
    """Return the modules that are neither in `tops` nor submodules of one."""
    return {
        name
        for name in modules
        if not any(name == top or name.startswith(f"{top}.") for top in tops)
    }


def _declared(package: Path) -> tuple[set[str], set[str]]:
    """Return the modules of a package's dependencies, and those of its extras."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return {_module_of(line) for line in project["dependencies"]}, {
        _module_of(line) for line in extras
    }


def _module_of(requirement: str) -> str:
    name = Requirement(requirement).name
    return _IMPORTED_AS.get(name, name.replace("-", "_"))


def _modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted((package / "src").rglob("*.py")):
        name = ".".join(file.relative_to(package / "src").with_suffix("").parts).removesuffix(
            ".__init__"
        )
        yield name, ast.parse(file.read_text())


def _at_import(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield what statements import at module import; not in functions or for type checkers."""
    for node in body:
        yield from _named(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _at_import(node.orelse)
        elif isinstance(node, ast.If):
            yield from _at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.With | ast.Try):
            yield from _at_import(node.body)


def _named(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports; an imported name may be a module too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _reached(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return all modules that importing a module imports, directly or through its package."""
    found, ahead = set[str](), [name]
    while ahead:
        each = ahead.pop()
        parts = each.split(".")
        around = {".".join(parts[:number]) for number in range(1, len(parts))}
        for other in (imports.get(each, set()) | around) - found:
            found.add(other)
            if other in imports:
                ahead.append(other)
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]


def _import_name(package: Path) -> str:
    return "temper_" + package.name.replace("-", "_")
