"""Test whether the core's tests notice faults: `python -m tools.mutants`.

Puts faults into a copy of a module, one at a time. They are sampled by seed from all places where
an operator, comparison, condition or number can be changed. A fault that no test of the module
notices is printed: either a test is missing, or the fault changes nothing. `nox -s mutants` runs
this program.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

ROOT = Path(__file__).resolve().parent.parent

TIMEOUT_FACTOR = 10
"""A test run that takes this many times as long as without a fault counts as failed.

A fault can make a loop endless.
"""

Op = TypeVar("Op", ast.cmpop, ast.operator, ast.boolop)

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationTarget:
    """A module and its tests."""

    package: str
    """Name of a folder in packages/."""
    module: str
    """Path below the package's src."""
    tests: tuple[str, ...]
    """Paths below the package's tests."""


TARGETS = {
    "reduction": MutationTarget(
        package="engine-api", module="temper_engine_api/reduction.py", tests=("test_reduction.py",)
    ),
    "plan": MutationTarget(
        package="engine-api",
        module="temper_engine_api/plan.py",
        tests=("test_plan.py", "test_balance.py"),
    ),
    "translator": MutationTarget(
        package="legacy-shim",
        module="temper_legacy_shim/configs/mapping/rl/batches.py",
        tests=("configs/test_arithmetic.py", "configs/test_translate.py", "configs/test_traps.py"),
    ),
}
"""The core: the loss reduction, the plan of a mini-batch, and the translator's arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A module with one change."""

    line: int
    was: str
    """The expression before the change."""
    now: str
    """The expression after the change."""
    source: str
    """Source of the changed module."""

    def __str__(self) -> str:
        return f"line {self.line}: `{self.was}` became `{self.now}`"


def list_faults(source: str) -> list[Fault]:
    """Return all faults that can be put into a module, sorted by line.

    Raise statements, annotations and decorators are not changed.
    """
    faults, tree = [], ast.parse(source)
    excluded = {id(node) for part in _iterate_excluded(tree) for node in ast.walk(part)}
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in excluded or not isinstance(node, ast.expr | ast.AugAssign | ast.If):
            continue
        for number in range(len(node.ops) if isinstance(node, ast.Compare) else 1):
            changed = copy.deepcopy(tree)
            # `ast.walk` visits the copy in the same order, so the position finds the same node.
            copied = next(each for i, each in enumerate(ast.walk(changed)) if i == index)
            shown = copied.test if isinstance(copied, ast.If) else copied
            was = ast.unparse(shown)
            _apply_fault(copied, number)
            now = ast.unparse(copied.test if isinstance(copied, ast.If) else copied)
            if now != was:
                faults.append(
                    Fault(line=node.lineno, was=was, now=now, source=ast.unparse(changed))
                )
    return sorted(faults, key=lambda fault: (fault.line, fault.was, fault.now))


def find_unnoticed_faults(
    root: Path, target: MutationTarget, *, num_faults: int, seed: int
) -> tuple[list[Fault], int, int]:
    """Run the tests on a sample of the faults.

    Returns:
        The faults that no test noticed, the number of tried faults, and the number of all faults.

    Raises:
        RuntimeError: If the tests fail without a fault.
    """
    all_faults = list_faults(
        (root / "packages" / target.package / "src" / target.module).read_text()
    )
    chosen = random.Random(seed).sample(all_faults, min(num_faults, len(all_faults)))
    with tempfile.TemporaryDirectory(prefix="temper-mutants-") as folder:
        sources = shutil.copytree(root / "packages" / target.package / "src", Path(folder) / "src")
        started = time.monotonic()
        if _is_noticed(root, target, sources=sources, limit_s=None):
            raise RuntimeError(
                f"the tests of {target.module} fail without any fault: fix them first"
            )
        limit_s = TIMEOUT_FACTOR * (time.monotonic() - started)
        unnoticed = []
        for fault in sorted(chosen, key=lambda each: each.line):
            (sources / target.module).write_text(fault.source)
            if not _is_noticed(root, target, sources=sources, limit_s=limit_s):
                unnoticed.append(fault)
    return unnoticed, len(chosen), len(all_faults)


def _is_noticed(
    root: Path, target: MutationTarget, *, sources: Path, limit_s: float | None
) -> bool:
    """Return whether a test fails or the tests do not end in time."""
    others = sorted(
        path for path in root.glob("packages/*/src") if path.parent.name != target.package
    )
    tests = [str(root / "packages" / target.package / "tests" / name) for name in target.tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not nightly and not slow",
        *tests,
    ]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in (sources, *others)),
        # A cached .pyc file of an earlier fault could be used instead of the changed source.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        result = subprocess.run(
            command, cwd=root, env=variables, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return result.returncode != 0


def _iterate_excluded(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.Raise):
            yield node


def _apply_fault(node: ast.AST, number: int) -> None:
    """Put the fault into a node in place; `number` selects an operator of chained comparisons."""
    if isinstance(node, ast.Compare):
        node.ops[number] = _swap(node.ops[number])
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = _swap(node.op)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
    elif isinstance(node, ast.BoolOp):
        node.op = _swap(node.op)
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body


def _swap(op: Op) -> Op:
    swap = SWAPS.get(type(op))
    return op if swap is None else cast(Op, swap())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a fault was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"any of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--faults", type=int, default=25, help="faults per module; default: 25")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.targets) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(TARGETS)}")
    is_clean = True
    for name in chosen.targets or TARGETS:
        unnoticed, num_tried, num_all = find_unnoticed_faults(
            ROOT, TARGETS[name], num_faults=chosen.faults, seed=chosen.seed
        )
        print(
            f"{TARGETS[name].module}: tests noticed {num_tried - len(unnoticed)} of {num_tried} "
            f"faults (sampled from {num_all})",
            flush=True,
        )
        print("".join(f"  not noticed: {fault}\n" for fault in unnoticed), end="", flush=True)
        is_clean = is_clean and not unnoticed
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
