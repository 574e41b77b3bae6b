"""Which modules of a package import what only an extra brings, and what nobody declares: read from the sources, nothing is imported.

`nox -s isolated` imports every module of a wheel without its extras, but for those in NEEDS_EXTRA; a test holds that table to what stands
here every day. Standard library and packaging alone.
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
        f"temper_legacy_shim.{room}"
        for room in (
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
        *(f"temper_trainer.rollout.vllm.{room}" for room in ("vllm_engine", "weight_transfer")),
    ),
}
"""Modules, and packages with all that is in them, that only an extra makes importable."""

_IMPORTED_AS = {
    "hydra-core": "hydra",
    "megatron-core": "megatron",
    "mlflow-skinny": "mlflow",
    "pyyaml": "yaml",
}
"""By distribution, where the name of its module is not its own with underscores."""

_COMES_ALONG = {"engine-api": {"fsspec"}, "engine-fsdp": {"huggingface_hub"}}
"""By package, what torch and transformers themselves require and bring: fsspec's one door says so where it is missing, and of
huggingface_hub the class is taken that transformers' configurations raise."""


def find_modules_needing_extra(package: Path) -> set[str]:
    """The modules whose import fails where none of the package's extras is installed."""
    always, optional = _declared(package)
    top = _import_name(package)
    imports = {name: set(_at_import(tree.body)) for name, tree in _modules(package)}
    return {
        name
        for name in imports
        if any(_top(each) in optional - always - {top} for each in _reached(name, imports))
    }


def find_undeclared_imports(package: Path) -> list[str]:
    """What a package imports, anywhere, of distributions that neither it nor an extra of it declares: a line for each."""
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
    """The modules that are neither in `tops` nor inside one of them."""
    return {
        name
        for name in modules
        if not any(name == top or name.startswith(f"{top}.") for top in tops)
    }


def _declared(package: Path) -> tuple[set[str], set[str]]:
    """The modules that come with a package, and those that its extras bring."""
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
    """What these statements import when a module is: not in functions, and not for type checkers."""
    for node in body:
        yield from _named(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _at_import(node.orelse)
        elif isinstance(node, ast.If):
            yield from _at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.With | ast.Try):
            yield from _at_import(node.body)


def _named(node: ast.AST) -> list[str]:
    """The modules of an import statement; what is taken out of one may be a module too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _reached(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Everything that the import of a module imports, through modules of the same package and the packages around them."""
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
