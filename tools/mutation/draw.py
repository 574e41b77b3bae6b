"""Draw the sample of mutants with cosmic-ray."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path

from tools.mutation.sample import Mutant, hash_context, hash_parts
from tools.mutation.sessions import MODULES

SEED = 0
NUM_MUTANTS = 120

CHECKS = ("check", "refuse", "warn", "has_type_of")
"""Starts of the names of functions that only check; an underscore may precede them."""

OUTSIDE_FUNCTIONS = {
    "_collect_metrics": "metrics of memory and speed",
    "_load_portable_state": "reads files of another engine; no test of the kit has two engines",
    "_sliding_window": "read by a check only",
    "has_cpu_kernels": "read by a warning only",
}
"""Functions that the kit does not run or whose result it cannot see, with the reason.

A mutant in one of them says nothing about the kit.
"""

OUTSIDE_CALLS = {
    "throughput.start": "metrics of speed",
    "tracer.stage": "names in a message",
}
"""Calls whose arguments the kit cannot see, with the reason."""

LEFT_OUT_OPERATORS = ("core/ExceptionReplacer", "core/RemoveDecorator")
"""Operators whose mutants change which errors are caught, or can hardly be run."""


def draw_sample(sources: Path, *, seed: int, num_mutants: int) -> list[Mutant]:
    """Sample mutants with cosmic-ray, at most one at each position of a module.

    Positions are ranked by a hash of the seed and their line, so a change of the sources replaces
    only mutants of the changed lines.
    """
    positions = [
        (hash_parts(seed, module, *key), module, changes)
        for module in MODULES
        for key, changes in _list_changes((sources / module).read_text()).items()
    ]
    chosen: list[Mutant] = []
    for rank, module, changes in sorted(positions, key=lambda position: position[0]):
        changes.sort(key=lambda change: hash_parts(rank, change.operator, change.number))
        source = (sources / module).read_text()
        mutants = (_make_mutant(module, source, change, id=rank[:8]) for change in changes)
        # Some changes give the same program or none, such as a removed `not` without its space.
        chosen += islice((mutant for mutant in mutants if mutant is not None), 1)
        if len(chosen) == num_mutants:
            break
    print(f"{len(chosen)} mutants, sampled from {len(positions)} positions")
    return sorted(chosen, key=lambda mutant: (mutant.module, mutant.line, mutant.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change that cosmic-ray can make at one position."""

    operator: str
    """Name of the operator for cosmic-ray."""
    occurrence: int
    """Number of the position among those that the operator can change in the module."""
    number: int
    """Number of the change among those of the operator at this position."""


def _list_changes(source: str) -> dict[tuple[str, int, int], list[_Change]]:
    """Return the changes by position: the line, its number among equal lines, and the column."""
    # Imported here, because only `draw` needs it.
    parsed, plugins = (import_module(f"cosmic_ray.{name}") for name in ("ast", "plugins"))
    excluded = list(_excluded_ranges(ast.parse(source)))
    lines, nodes = source.split("\n"), list(parsed.ast_nodes(parsed.get_ast(source)))
    changes: dict[tuple[str, int, int], list[_Change]] = {}
    for name in plugins.operator_names():
        operator_class = plugins.get_operator(name)
        if name in LEFT_OUT_OPERATORS or operator_class.arguments():
            continue
        operator = operator_class()
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(starts):
            if not any(first <= (line, column) < end for first, end in excluded):
                text = lines[line - 1].strip()
                number = sum(each.strip() == text for each in lines[: line - 1])
                changes.setdefault((text, number, column), []).append(
                    _Change(
                        operator=name,
                        occurrence=occurrence,
                        number=starts[:occurrence].count((line, column)),
                    )
                )
    return changes


def _make_mutant(module: str, source: str, change: _Change, *, id: str) -> Mutant | None:
    """Return the mutant, or None if the program stays the same or cannot be parsed."""
    plugins, mutating = (import_module(f"cosmic_ray.{name}") for name in ("plugins", "mutating"))
    operator = plugins.get_operator(change.operator)()
    changed: str | None = mutating.mutate_code(source, operator, change.occurrence)
    try:
        if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    line, old, new = _difference(source, changed)
    return Mutant(
        id=id,
        module=module,
        operator=change.operator.removeprefix("core/"),
        occurrence=change.occurrence,
        line=line,
        old=old,
        new=new,
        context=hash_context(source, line=line),
    )


def _difference(source: str, changed: str) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    before, after = source.split("\n"), changed.split("\n")
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    different = [code for code in codes if code[0] != "equal"]
    first, end = different[0][1], different[-1][2]
    return (
        first + 1,
        tuple(before[first:end]),
        tuple(after[different[0][3] : different[-1][4]]),
    )


def _excluded_ranges(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the start and end of code that computes nothing, or nothing that the kit can see.

    Such code checks, warns, declares or measures speed.
    """
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts += node.decorator_list
            # A default value matters only to a caller outside of the engine.
            yield (node.lineno, node.col_offset), (node.body[0].lineno, 0)
            if node.name.lstrip("_").startswith(CHECKS) or node.name in OUTSIDE_FUNCTIONS:
                parts.append(node)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func).endswith(tuple(OUTSIDE_CALLS)):
                parts.append(node)
        elif isinstance(node, ast.ClassDef):
            parts += node.decorator_list
        elif isinstance(node, ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.Raise | ast.Assert):
            parts.append(node)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            parts += [node.test, *node.body]
        for part in parts:
            if isinstance(part, ast.expr | ast.stmt):
                end = (part.end_lineno or part.lineno, part.end_col_offset or 0)
                yield (part.lineno, part.col_offset), end
