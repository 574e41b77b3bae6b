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

PATIENCE = 10
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
class Subject:
    """A module and its tests."""

    package: str
    """Name of a folder in packages/."""
    module: str
    """Path below the package's src."""
    tests: tuple[str, ...]
    """Paths below the package's tests."""


SUBJECTS = {
    "reduction": Subject(
        package="engine-api", module="temper_engine_api/reduction.py", tests=("test_reduction.py",)
    ),
    "plan": Subject(
        package="engine-api",
        module="temper_engine_api/plan.py",
        tests=("test_plan.py", "test_balance.py"),
    ),
    "translator": Subject(
        package="legacy-shim",
        module="temper_legacy_shim/configs/batches.py",
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


def faults(source: str) -> list[Fault]:
    """Return all faults that can be put into a module, sorted by line.

    Raise statements, annotations and decorators are not changed.
    """
    found, tree = [], ast.parse(source)
    spared = {id(node) for part in _spared(tree) for node in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in spared or not isinstance(node, ast.expr | ast.AugAssign | ast.If):
            continue
        for number in range(len(node.ops) if isinstance(node, ast.Compare) else 1):
            changed = copy.deepcopy(tree)
            # `ast.walk` visits the copy in the same order, so the position finds the same node.
            there = next(each for i, each in enumerate(ast.walk(changed)) if i == place)
            shown = there.test if isinstance(there, ast.If) else there
            was = ast.unparse(shown)
            _change(there, number)
            now = ast.unparse(there.test if isinstance(there, ast.If) else there)
            if now != was:
                found.append(Fault(line=node.lineno, was=was, now=now, source=ast.unparse(changed)))
    return sorted(found, key=lambda fault: (fault.line, fault.was, fault.now))


def survivors(
    root: Path, subject: Subject, *, num_faults: int, seed: int
) -> tuple[list[Fault], int, int]:
    """Run the tests on a sample of the faults.

    Returns:
        The faults that no test noticed, the number of tried faults, and the number of all faults.

    Raises:
        RuntimeError: If the tests fail without a fault.
    """
    every = faults((root / "packages" / subject.package / "src" / subject.module).read_text())
    chosen = random.Random(seed).sample(every, min(num_faults, len(every)))
    with tempfile.TemporaryDirectory(prefix="temper-mutants-") as folder:
        sources = shutil.copytree(root / "packages" / subject.package / "src", Path(folder) / "src")
        started = time.monotonic()
        if _is_seen(root, subject, sources=sources, limit_s=None):
            raise RuntimeError(
                f"the tests of {subject.module} fail without any fault: mend that first"
            )
        limit_s = PATIENCE * (time.monotonic() - started)
        missed = []
        for fault in sorted(chosen, key=lambda each: each.line):
            (sources / subject.module).write_text(fault.source)
            if not _is_seen(root, subject, sources=sources, limit_s=limit_s):
                missed.append(fault)
    return missed, len(chosen), len(every)


def _is_seen(root: Path, subject: Subject, *, sources: Path, limit_s: float | None) -> bool:
    """Return whether a test fails or the tests do not end in time."""
    others = sorted(
        path for path in root.glob("packages/*/src") if path.parent.name != subject.package
    )
    tests = [str(root / "packages" / subject.package / "tests" / name) for name in subject.tests]
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
        done = subprocess.run(
            command, cwd=root, env=variables, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def _spared(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.Raise):
            yield node


def _change(node: ast.AST, number: int) -> None:
    """Put the fault into a node in place; `number` selects an operator of chained comparisons."""
    if isinstance(node, ast.Compare):
        node.ops[number] = _swapped(node.ops[number])
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = _swapped(node.op)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
    elif isinstance(node, ast.BoolOp):
        node.op = _swapped(node.op)
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body


def _swapped(op: Op) -> Op:
    swap = SWAPS.get(type(op))
    return op if swap is None else cast(Op, swap())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a fault was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("subjects", nargs="*", help=f"of {', '.join(SUBJECTS)}; all by default")
    parser.add_argument("--faults", type=int, default=25, help="in each module")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(SUBJECTS)}")
    is_clean = True
    for name in chosen.subjects or SUBJECTS:
        missed, num_tried, num_all = survivors(
            ROOT, SUBJECTS[name], num_faults=chosen.faults, seed=chosen.seed
        )
        print(
            f"{SUBJECTS[name].module}: {num_tried - len(missed)} of {num_tried} faults seen (drawn from {num_all})",
            flush=True,
        )
        print("".join(f"  not seen: {fault}\n" for fault in missed), end="", flush=True)
        is_clean = is_clean and not missed
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
