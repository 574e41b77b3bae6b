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
    "engine-fsdp": (
        "temper_engine_fsdp.training.lora_adapter",
        "temper_engine_fsdp.training.lora_targets",
    ),
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
                "device_holder",
                "ray_calls",
                "ray_replica",
                "ray_runtime",
                "ray_sampler",
                "ray_worker_group",
            )
        ),
        "temper_trainer.environment.agent_environment",
        "temper_trainer.environment.gateway.gateway_server",
        "temper_trainer.environment.gymnasium_environment",
        "temper_trainer.environment.mcp_environment",
        "temper_trainer.environment.openenv_environment",
        "temper_trainer.environment.verifiers_tasks",
        "temper_trainer.reward.judge_scoring",
        *(
            f"temper_trainer.metrics.{module}"
            for module in ("curves", "evaluation_plots", "report")
        ),
        *(
            f"temper_trainer.rollout.vllm.{module}"
            for module in ("expert_capture", "vllm_engine", "weight_transfer")
        ),
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

_INSTALLED_BY_OTHERS = {
    "engine-api": {"fsspec"},
    "engine-fsdp": {"huggingface_hub"},
    "engine-megatron": {"huggingface_hub"},
    "legacy-shim": {"fsspec"},
}
"""Modules that a package imports and torch or transformers installs.

The modules that use fsspec report if it is missing; of huggingface_hub only exceptions are used,
which transformers raises.
"""


def find_modules_needing_extra(package: Path) -> set[str]:
    """Return the modules whose import fails if no extra of the package is installed."""
    always, optional = _read_declared_modules(package)
    top = _get_package_module(package)
    imports = {
        name: set(_list_import_time_imports(tree.body)) for name, tree in _parse_modules(package)
    }
    return {
        name
        for name in imports
        if any(
            _get_top_package(each) in optional - always - {top}
            for each in _list_reachable(name, imports)
        )
    }


def find_undeclared_imports(package: Path) -> list[str]:
    """Return `module: import` for each import that neither the package nor its extras declare."""
    always, optional = _read_declared_modules(package)
    known = (
        always
        | optional
        | {
            _get_package_module(package),
            *sys.stdlib_module_names,
            "_typeshed",  # a module of type checkers only
            *_INSTALLED_BY_OTHERS.get(package.name, ()),
        }
    )
    undeclared = []
    for name, tree in _parse_modules(package):
        for node in ast.walk(tree):
            undeclared += [
                f"{name}: {_get_top_package(each)}"
                for each in _list_imports(node)
                if _get_top_package(each) not in known
            ]
    return sorted(set(undeclared))


def drop_submodules(modules: Iterable[str], tops: Iterable[str]) -> set[str]:
    """Return the modules that are neither in `tops` nor submodules of one."""
    return {
        name
        for name in modules
        if not any(name == top or name.startswith(f"{top}.") for top in tops)
    }


def _read_declared_modules(package: Path) -> tuple[set[str], set[str]]:
    """Return the modules of a package's dependencies, and those of its extras."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return {_get_module_name(line) for line in project["dependencies"]}, {
        _get_module_name(line) for line in extras
    }


def _get_module_name(requirement: str) -> str:
    name = Requirement(requirement).name
    return _IMPORTED_AS.get(name, name.replace("-", "_"))


def _parse_modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted((package / "src").rglob("*.py")):
        name = ".".join(file.relative_to(package / "src").with_suffix("").parts).removesuffix(
            ".__init__"
        )
        yield name, ast.parse(file.read_text())


def _list_import_time_imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield what statements import at module import; not in functions or for type checkers."""
    for node in body:
        yield from _list_imports(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _list_import_time_imports(node.orelse)
        elif isinstance(node, ast.If):
            yield from _list_import_time_imports([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.With | ast.Try):
            yield from _list_import_time_imports(node.body)


def _list_imports(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports; an imported name may be a module too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _list_reachable(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return all modules that importing a module imports, directly or through its package."""
    reached, pending = set[str](), [name]
    while pending:
        each = pending.pop()
        parts = each.split(".")
        parents = {".".join(parts[:number]) for number in range(1, len(parts))}
        for other in (imports.get(each, set()) | parents) - reached:
            reached.add(other)
            if other in imports:
                pending.append(other)
    return reached


def _get_top_package(module: str) -> str:
    return module.partition(".")[0]


def _get_package_module(package: Path) -> str:
    return "temper_" + package.name.replace("-", "_")
