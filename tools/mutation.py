"""Test whether the conformance kit detects changes of FSDPEngine's arithmetic.

    python -m tools.mutation draw                      # needs cosmic-ray; rewrites the sample
    python -m tools.mutation run --out FOLDER [--workers 14] [--budget-s 560]
    python -m tools.mutation page STATE [STATE ...]    # rewrites docs/records/mutation.md

A mutant is the engine with one changed operator, comparison, condition or number, as cosmic-ray
makes it. `draw` samples mutants with a fixed seed and keeps them in tools/mutation_sample.json.
`run` needs no cosmic-ray: it puts one mutant at a time into a copy of the engine, and runs the kit
on it until the first failure. The state of the run is in FOLDER/mutation.json after each session of
the kit, so that a later call, also on another machine, continues there. After a complete run, a
later call begins again. `nox -s mutation` does all three. `tools/mutation_equivalents.toml` lists
mutants that need not be detected, with the reasons.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "engine-fsdp"
SOURCES = PACKAGE / "src" / "temper_engine_fsdp"
SAMPLE = ROOT / "tools" / "mutation_sample.json"
EQUIVALENTS = ROOT / "tools" / "mutation_equivalents.toml"
RECORD = ROOT / "docs" / "records" / "mutation.json"
PAGE = ROOT / "docs" / "records" / "mutation.md"
STATE = "mutation.json"
"""Name of the file with the state of a run."""

MODULES = (
    "engine.py",
    "model/activation_checkpointing.py",
    "model/output_head.py",
    "model/packed_attention.py",
    "model/packed_model.py",
    "model/sequence_parallel.py",
    "model/token_logprobs.py",
    "runtime/numerics.py",
    "sharding/fsdp1.py",
    "sharding/fsdp2.py",
    "sharding/sharded_module.py",
    "sharding/sharded_parameter.py",
    "training/lora_adapter.py",
    "training/micro_batch_runner.py",
    "training/sharded_optimizer.py",
    "training/torch_optimizer.py",
)
"""Modules that compute outputs, losses, gradients, norms or updates, or pack or shard tensors."""

START_OF_TABLES = "<!-- The tables below are generated. -->"
END_OF_TABLES = "<!-- Text below this line is kept. -->"

MAX_SURVIVORS = 0.05
"""Largest accepted fraction of mutants that are not detected."""

SEED = 0
NUM_MUTANTS = 110

LEFT_OUT_OPERATORS = ("core/ExceptionReplacer", "core/RemoveDecorator")
"""Operators whose mutants change which errors are caught, or can hardly be run."""

SESSION_LIMIT_S = 1800.0
"""Time limit of one session of the kit; a mutant that exceeds it counts as detected."""

NO_TESTS = 5
"""Exit status of pytest if no test was left to run."""

SESSION_VARIABLE = "TEMPER_MUTATION_SESSION"
"""Environment variable with the tests of a session, as JSON; read by pytest's hook below."""

GROUP_ORDER = (
    "gradient",
    "update",
    "optimizer",
    "logprob",
    "sizes",
    "value",
    "settings",
    "model_settings",
    "adapter",
    "batch",
    "weights",
    "checkpoint",
    "expert_adapter",
    "offload",
    "rfc_loop",
    "call_order",
    "failed_call",
    "capability",
    "step_directory",
)
"""Groups of the kit; those that detect most mutants come first."""

NUMERIC_GROUPS = GROUP_ORDER[: GROUP_ORDER.index("checkpoint") + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSession:
    """One run of the kit on a mutant. The ranks stay alive through all of its layouts."""

    arguments: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    """Groups to run by layout, in this order."""
    modules: tuple[str, ...] = MODULES
    """Modules whose mutants need this session."""
    needs_cuda: bool = False


SHARDING_MODULES = (
    "engine.py",
    "model/sequence_parallel.py",
    "sharding/fsdp1.py",
    "sharding/fsdp2.py",
    "sharding/sharded_module.py",
    "sharding/sharded_parameter.py",
)

SESSIONS = {
    "one-rank": KitSession(
        arguments=(
            *("--world-sizes", "1"),
            *("--layouts", "logits-kept.1,checkpointed.1,optimizer-on-cpu.1,fsdp1.1"),
        ),
        layouts={
            "1-rank": GROUP_ORDER,
            "logits-kept.1": ("gradient", "logprob", "sizes", "adapter"),
            "checkpointed.1": ("gradient", "update", "logprob", "sizes", "adapter"),
            "optimizer-on-cpu.1": ("update", "optimizer", "settings", "weights", "checkpoint"),
            "fsdp1.1": ("gradient", "update", "optimizer", "adapter", "weights"),
        },
    ),
    "two-ranks": KitSession(
        arguments=(
            *("--world-sizes", "2"),
            *("--layouts", "fsdp1.2,sp2.2,replicated.2,no-reshard.2,fsdp1-replicated.2,together.2"),
        ),
        layouts={
            "2-ranks": GROUP_ORDER,
            "fsdp1.2": (*NUMERIC_GROUPS, "offload", "failed_call"),
            "sp2.2": NUMERIC_GROUPS,
            "replicated.2": ("gradient", "update", "weights", "adapter", "checkpoint"),
            "no-reshard.2": ("gradient", "update", "weights"),
            "fsdp1-replicated.2": ("gradient", "update", "weights", "adapter"),
            "together.2": ("gradient", "update"),
        },
    ),
    "bf16": KitSession(
        arguments=("--compute", "bf16", "--world-sizes", "1", "--layouts", "fsdp1.1,logits-kept.1"),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "fsdp1.1": ("gradient", "update"),
            "logits-kept.1": ("gradient", "logprob"),
        },
    ),
    "four-ranks": KitSession(
        arguments=("--layouts", "hybrid.4,hybrid-no-reshard.4,fsdp1-hybrid.4,reshard-to-2.4"),
        layouts={
            "hybrid.4": ("gradient", "update", "weights"),
            "fsdp1-hybrid.4": ("gradient", "update", "weights"),
            "reshard-to-2.4": ("gradient", "update"),
            "hybrid-no-reshard.4": ("gradient", "update"),
        },
        modules=SHARDING_MODULES,
    ),
    "cuda": KitSession(
        arguments=("--device", "cuda", "--world-sizes", "1", "--layouts", "optimizer-on-cpu.1"),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "optimizer-on-cpu.1": ("update", "optimizer"),
        },
        needs_cuda=True,
    ),
    "cuda-bf16": KitSession(
        arguments=(
            *("--device", "cuda", "--compute", "bf16"),
            *("--world-sizes", "1", "--layouts", "optimizer-on-cpu.1"),
        ),
        layouts={
            "1-rank": NUMERIC_GROUPS,
            "optimizer-on-cpu.1": ("update", "optimizer"),
        },
        needs_cuda=True,
    ),
}
"""Sessions of the kit, cheapest first. A mutant survives if it passes all that it needs."""

QUICK_GROUPS = ("gradient", "update", "weights")
"""Groups that run first, in all layouts of a session."""

FIRST_LAYOUTS = {
    "model/activation_checkpointing.py": ("one-rank", "checkpointed.1"),
    "model/sequence_parallel.py": ("two-ranks", "sp2.2"),
    "sharding/fsdp1.py": ("two-ranks", "fsdp1.2"),
    "sharding/fsdp2.py": ("two-ranks", "2-ranks"),
    "sharding/sharded_parameter.py": ("two-ranks", "2-ranks"),
}
"""Session and layout that are most likely to detect the mutants of a module."""

FIRST_GROUPS = {
    "model/output_head.py": ("value", "logprob"),
    "training/lora_adapter.py": ("adapter", "expert_adapter"),
    "training/torch_optimizer.py": ("settings", "optimizer"),
}
"""Groups of the kit that are most likely to detect the mutants of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module with one changed position."""

    id: str
    """Eight hexadecimal digits; does not depend on other lines of the module."""
    module: str
    """A path of MODULES."""
    operator: str
    """Operator of cosmic-ray."""
    occurrence: int
    """Number of the position among those that the operator can change in this module."""
    line: int
    """First changed line, from 1."""
    old: tuple[str, ...]
    """The changed lines before the change."""
    new: tuple[str, ...]
    """The same lines after the change."""
    context: str
    """Hash of the function that contains the change, before the change."""

    def apply(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: If the source is not the one from which the mutant was drawn.
        """
        lines = source.split("\n")
        first, end = self.line - 1, self.line - 1 + len(self.old)
        if tuple(lines[first:end]) != self.old:
            raise ValueError(
                f"{self.module} has changed at line {self.line} since the sample was drawn: run "
                "`python -m tools.mutation draw`."
            )
        return "\n".join([*lines[:first], *self.new, *lines[end:]])


@dataclass(slots=True, kw_only=True)
class MutantResult:
    """Result of the kit on one mutant, possibly unfinished."""

    outcome: str = "unfinished"
    """"detected", "at import", "time limit", "survived" or "unfinished"."""
    session: str = ""
    """Key of SESSIONS in which it was detected."""
    layout: str = ""
    test: str = ""
    detail: str = ""
    """First line of the failure."""
    took_s: float = 0.0
    """Time of all sessions, including interrupted ones."""
    context: str = ""
    """Context of the mutant. A detected mutant runs again if its function has changed."""
    sources: str = ""
    """Hash of the kit and the engine. All other mutants of other sources run again."""
    passed: dict[str, list[str]] = field(default_factory=dict)
    """Tests that passed by session, as layout and name; dropped if the mutant is detected."""
    finished: list[str] = field(default_factory=list)
    """Sessions that passed."""

    @property
    def is_detected(self) -> bool:
        return self.outcome in ("detected", "at import", "time limit")


# Drawing the sample


def draw_sample(sources: Path, *, seed: int, num_mutants: int) -> list[Mutant]:
    """Sample mutants with cosmic-ray, at most one at each position of a module.

    Positions are ranked by a hash of the seed and their line, so a change of the sources replaces
    only mutants of the changed lines.
    """
    positions = [
        (_hash(seed, module, *key), module, changes)
        for module in MODULES
        for key, changes in _list_changes((sources / module).read_text()).items()
    ]
    chosen: list[Mutant] = []
    for rank, module, changes in sorted(positions, key=lambda position: position[0]):
        changes.sort(key=lambda change: _hash(rank, change.operator, change.number))
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


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


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


def hash_context(source: str, *, line: int) -> str:
    """Return a hash of the innermost function around a line, or of the line itself."""
    functions = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    around = [(first, end) for first, end in functions if first <= line <= end]
    first, end = max(around, default=(line, line))
    return _hash(*source.split("\n")[first - 1 : end])[:12]


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
    """Yield the start and end of code that checks, warns or declares, and computes nothing."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts += node.decorator_list
            # A default value matters only to a caller outside of the engine.
            yield (node.lineno, node.col_offset), (node.body[0].lineno, 0)
            if node.name.lstrip("_").startswith(("check", "refuse", "warn", "has_type_of")):
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


# Running the kit


class MutationRun:
    """Runs the kit on the mutants of the sample in parallel, and keeps the state."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        results: dict[str, MutantResult],
        *,
        out: Path,
        deadline: float,
        has_cuda: bool,
    ) -> None:
        self._mutants = {mutant.id: mutant for mutant in mutants}
        self.results = results
        self._out = out
        self._deadline = deadline
        self._has_cuda = has_cuda
        self._lock = threading.Lock()
        self._sources = hash_sources()
        self._original = name_original()

    def run(self, ids: Sequence[str], *, num_workers: int) -> None:
        """Run all mutants with these ids, `num_workers` at a time."""
        folders = [self._out / f"worker-{index}" for index in range(num_workers)]
        for folder in folders:
            prepare_worker(folder)
        free = list(folders)
        with ThreadPoolExecutor(num_workers) as pool:

            def run_one(mutant_id: str) -> None:
                with self._lock:
                    folder = free.pop()
                try:
                    self._run_mutant(mutant_id, folder=folder)
                finally:
                    with self._lock:
                        free.append(folder)

            for future in [pool.submit(run_one, mutant_id) for mutant_id in ids]:
                future.result()
        for folder in folders:
            shutil.rmtree(folder)

    def _run_mutant(self, mutant_id: str, *, folder: Path) -> None:
        mutant = self._mutants.get(mutant_id)
        module = MODULES[0] if mutant is None else mutant.module
        result = self.results.setdefault(mutant_id, MutantResult())
        if result.sources != self._sources:
            result = self.results[mutant_id] = MutantResult(
                context="" if mutant is None else mutant.context, sources=self._sources
            )
        package = folder / "src" / SOURCES.name
        # Python would take a .pyc file of the last mutant for the source, if size and time agree.
        for cache in package.rglob("__pycache__"):
            shutil.rmtree(cache)
        source = (SOURCES / module).read_text()
        (package / module).write_text(source if mutant is None else mutant.apply(source))
        try:
            for name in self._needed_sessions(module, is_original=mutant is None):
                if name not in result.finished:
                    self._run_session(name, result, module=module, folder=folder)
                if result.is_detected or name not in result.finished:
                    break
            else:
                result.outcome = "survived"
        finally:
            (package / module).write_text(source)
        self._save()
        left = sum(each.outcome == "unfinished" for each in self.results.values())
        print(
            f"{mutant_id} {module}: {result.outcome} {result.layout} {result.test} "
            f"({result.took_s:.0f} s; {left} unfinished)",
            flush=True,
        )

    def _needed_sessions(self, module: str, *, is_original: bool) -> list[str]:
        names = [
            name
            for name, session in SESSIONS.items()
            if (module in session.modules or is_original)
            and (self._has_cuda or not session.needs_cuda)
        ]
        first = None if is_original else FIRST_LAYOUTS.get(module)
        return names if first is None else sorted(names, key=lambda name: name != first[0])

    def _run_session(self, name: str, result: MutantResult, *, module: str, folder: Path) -> None:
        """Run a session up to its first failure or the end of the budget, and update the result."""
        if time.monotonic() >= self._deadline:
            return
        session, is_original = SESSIONS[name], result is self.results.get(self._original)
        first_layout = FIRST_LAYOUTS.get(module, ("", ""))[1]
        first_groups = FIRST_GROUPS.get(module, ())
        # Older versions cannot reset FSDP2 after an exception, and the engine says so.
        left_out = () if _torch_version() >= (2, 13) else ("failed_call",)
        selection = {
            "layouts": {
                layout: [
                    *(group for group in first_groups if group in groups),
                    *(group for group in groups if group not in left_out),
                ]
                for layout, groups in sorted(
                    session.layouts.items(), key=lambda item: item[0] != first_layout
                )
            },
            "quick": [*QUICK_GROUPS, *first_groups],
            "passed": [*result.passed.get(name, ()), *self._failed_without_mutant(name)],
        }
        results_file = folder / "results.json"
        results_file.unlink(missing_ok=True)
        started = time.monotonic()
        limit_s = min(SESSION_LIMIT_S, self._deadline - started)
        status = run_kit(
            session,
            selection,
            folder=folder,
            results_file=results_file,
            limit_s=limit_s,
            stops_at_failure=not is_original,
        )
        rows = json.loads(results_file.read_text())["results"] if results_file.exists() else []
        result.took_s += round(time.monotonic() - started, 1)
        failed = [row for row in rows if row["outcome"] == "failed"]
        passed = [f"{row['layout']} {row['test']}" for row in rows if row["outcome"] == "passed"]
        if is_original and failed:
            # Kept among the passed tests, so that they are not run again.
            result.detail += "".join(f"{name} {row['layout']} {row['test']}\n" for row in failed)
            passed += [f"{row['layout']} {row['test']}" for row in failed]
        elif failed:
            result.outcome, result.session = "detected", name
            result.layout, result.test = failed[0]["layout"], failed[0]["test"]
            result.detail = failed[0]["detail"]
        elif status is None and limit_s == SESSION_LIMIT_S:
            result.outcome, result.session = "time limit", name
        elif status not in (0, None, NO_TESTS):
            # pytest could not even import the engine, or died.
            result.outcome, result.session = "at import", name
            result.detail = (folder / "output.txt").read_text()[-300:]
        result.passed[name] = [*result.passed.get(name, ()), *passed]
        if status in (0, NO_TESTS) or (is_original and status == 1):
            result.finished.append(name)
            result.passed[name] = []
        if result.is_detected:
            result.passed = {}
        self._save()

    def _failed_without_mutant(self, session: str) -> list[str]:
        """Return the tests of a session that the unchanged engine fails on this machine."""
        original = self.results.get(self._original)
        lines = original.detail.splitlines() if original is not None else []
        return [
            line.removeprefix(f"{session} ") for line in lines if line.startswith(f"{session} ")
        ]

    def _save(self) -> None:
        with self._lock:
            write_state(self._out / STATE, self.results)


def prepare_worker(folder: Path) -> None:
    """Copy the engine to the folder, with its entry points as if it were installed there."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(
        SOURCES, folder / "src" / SOURCES.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "tmp").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    for package in ("engine-api", "engine-fsdp"):
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())[
            "project"
        ]
        information = (
            folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        )
        information.mkdir()
        requirements = "".join(
            f"Requires-Dist: {line}\n" for line in project["dependencies"] if "temper" in line
        )
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            + requirements
        )
        (information / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
                for group, points in project.get("entry-points", {}).items()
            )
        )


def run_kit(
    session: KitSession,
    selection: Mapping[str, object],
    *,
    folder: Path,
    results_file: Path,
    limit_s: float,
    stops_at_failure: bool,
) -> int | None:
    """Run a session on the engine in a worker's folder; return pytest's status.

    Returns None if the time limit was reached.
    """
    sources = [folder / "src", ROOT / "packages" / "engine-api" / "src", ROOT]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [*map(str, sources), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        SESSION_VARIABLE: json.dumps(selection),
        **({} if session.needs_cuda else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    command = [
        *(sys.executable, "-m", "temper_engine_api.conformance", "--engine", "fsdp"),
        *session.arguments,
        *("-q", "--tb=short", "-W", "default", "-p", "tools.mutation"),
        *("--results", str(results_file), "--basetemp", str(folder / "tmp" / "pytest")),
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder)),
        *(("-x",) if stops_at_failure else ()),
    ]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that killing it reaches the ranks too.
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that passed or are not in the session, and sort the others.

    A hook of pytest: `run_kit` loads this module as a plugin. The kit has added group and layout to
    the properties of each test.
    """
    if SESSION_VARIABLE not in os.environ:
        return
    selection = json.loads(os.environ[SESSION_VARIABLE])
    passed, layouts = set(selection["passed"]), list(selection["layouts"])
    ranked, left_out = [], []
    for item in items:
        properties = {name: str(value) for name, value in item.user_properties}
        layout, group = properties["layout"], properties["group"]
        groups = selection["layouts"].get(layout, [])
        if group not in groups or f"{layout} {item.name}" in passed:
            left_out.append(item)
        else:
            is_quick = group in selection["quick"]
            ranked.append(((not is_quick, layouts.index(layout), groups.index(group)), item))
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


# Files


def read_sample() -> list[Mutant]:
    """Return the sampled mutants."""
    return [
        Mutant(**{**row, "old": tuple(row["old"]), "new": tuple(row["new"])})
        for row in json.loads(SAMPLE.read_text())
    ]


def read_equivalents() -> dict[str, tuple[str, str]]:
    """Return kind and reason of the mutants that need not be detected, by id."""
    rows = tomllib.loads(EQUIVALENTS.read_text()).get("mutant", [])
    return {row["id"]: (row["kind"], row["reason"]) for row in rows}


def name_original() -> str:
    """Return the key of the results of the unchanged engine on this machine."""
    return f"unchanged with torch {version('torch').partition('+')[0]}"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("torch").split(".")[:2])


def hash_sources() -> str:
    """Return a hash of the sources of the kit and the engine."""
    digest = hashlib.sha256()
    for package in ("engine-api", "engine-fsdp"):
        for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_states(paths: Iterable[Path], *, mutants: Iterable[Mutant]) -> dict[str, MutantResult]:
    """Merge the states of several runs; a finished result wins over an unfinished one.

    Tests are added far more often than removed, so a detected mutant stays detected as long as its
    function is the same. Other results are valid for the same kit and engine only.
    """
    merged: dict[str, MutantResult] = {}
    sources = hash_sources()
    contexts = {mutant.id: mutant.context for mutant in mutants}
    for path in paths:
        for mutant_id, row in json.loads(path.read_text()).items():
            result = MutantResult(**row)
            is_valid = (
                result.context == contexts.get(mutant_id)
                if result.is_detected
                else result.sources == sources
            )
            known = merged.get(mutant_id)
            if is_valid and (known is None or _progress(result) > _progress(known)):
                merged[mutant_id] = result
    return merged


def _progress(result: MutantResult) -> tuple[bool, int, int]:
    return (
        result.outcome != "unfinished",
        len(result.finished),
        sum(len(tests) for tests in result.passed.values()),
    )


def has_finished(state: Path, names: Iterable[str]) -> bool:
    """Return True if the state of a run has a final result for each of these mutants."""
    if not state.exists():
        return False
    rows = json.loads(state.read_text())
    return all(name in rows and rows[name]["outcome"] != "unfinished" for name in names)


def write_state(path: Path, results: Mapping[str, MutantResult]) -> None:
    """Replace the file with the state of a run."""
    partial = path.with_name(f"{path.name}.partial")
    rows = {name: asdict(results[name]) for name in sorted(results)}
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)


def render_page(
    mutants: Sequence[Mutant],
    results: Mapping[str, MutantResult],
    equivalents: Mapping[str, tuple[str, str]],
) -> str:
    """Return the generated part of the page: totals, all mutants, and the excluded ones."""
    counted = [mutant for mutant in mutants if mutant.id not in equivalents]
    by_id = {mutant.id: results.get(mutant.id, MutantResult()) for mutant in counted}
    lines = [
        "| module | mutants | wrong result | exception | at import | time limit | not detected |",
        "|---|---|---|---|---|---|---|",
    ]
    for module in (*MODULES, ""):
        verdicts = Counter(
            _verdict(by_id[mutant.id])
            for mutant in counted
            if mutant.module == (module or mutant.module)
        )
        cells = [
            verdicts[name] for name in ("wrong result", "exception", "at import", "time limit")
        ]
        total = sum(verdicts.values())
        if total:
            row = [f"`{module}`" if module else "all", total, *cells, total - sum(cells)]
            lines.append("| " + " | ".join(map(str, row)) + " |")
    num_detected = sum(result.is_detected for result in by_id.values())
    lines += [
        "",
        f"Detected: {num_detected} of {len(counted)} ({100 * num_detected / len(counted):.0f} %).",
        "",
        "| mutant | position | change | layout | detected by |",
        "|---|---|---|---|---|",
    ]
    for mutant in counted:
        result = by_id[mutant.id]
        test = f"`{result.test.partition('[')[0]}`" if result.test else f"**{result.outcome}**"
        lines.append(f"| {_describe(mutant)} | {result.layout or '-'} | {test} |")
    lines += ["", "## Mutants that need not be detected", ""]
    lines += ["| mutant | position | change | kind | reason |", "|---|---|---|---|---|"]
    for mutant in mutants:
        if mutant.id in equivalents:
            kind, reason = equivalents[mutant.id]
            lines.append(f"| {_describe(mutant)} | {kind} | {reason} |")
    return "\n".join(lines) + "\n"


def _verdict(result: MutantResult) -> str:
    if result.outcome != "detected":
        return result.outcome
    # The kit's message for an exception in a rank, as opposed to a failed comparison.
    return "exception" if " raised in " in result.detail else "wrong result"


def _describe(mutant: Mutant) -> str:
    def escape(code: Sequence[str]) -> str:
        text = " ".join(" ".join(code).split()).partition("  #")[0]
        return "`" + text.replace("|", "\\|") + "`"

    position = f"`{mutant.module}`, line {mutant.line}"
    return f"{mutant.id} | {position} | {escape(mutant.old)} becomes {escape(mutant.new)}"


def _write_page(paths: Sequence[Path]) -> int:
    """Rewrite the page's tables; return 1 if too few mutants were detected."""
    mutants, equivalents = read_sample(), read_equivalents()
    states = read_states(paths, mutants=mutants)
    results = {mutant.id: states[mutant.id] for mutant in mutants if mutant.id in states}
    for result in results.values():
        result.passed = {}
    write_state(RECORD, results)
    before, _, rest = PAGE.read_text().partition(START_OF_TABLES)
    _, _, after = rest.partition(END_OF_TABLES)
    tables = render_page(mutants, results, equivalents)
    PAGE.write_text(f"{before}{START_OF_TABLES}\n\n{tables}\n{END_OF_TABLES}{after}")
    counted = [mutant.id for mutant in mutants if mutant.id not in equivalents]
    missed = [name for name in counted if name not in results or not results[name].is_detected]
    print(f"{len(missed)} of {len(counted)} mutants were not detected: {' '.join(missed)}")
    return 1 if len(missed) > MAX_SURVIVORS * len(counted) else 0


def _run(chosen: argparse.Namespace) -> int:
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    mutants, equivalents = read_sample(), read_equivalents()
    names = [name_original()] if not chosen.skip_original else []
    names += [
        mutant.id
        for mutant in mutants
        if mutant.id not in equivalents or (chosen.cuda and equivalents[mutant.id][0] == "cuda")
    ]
    state = out / STATE
    # Begin again after a complete run: with the results kept, a test that was weakened since then
    # would never meet the mutants that it used to detect.
    if not chosen.only and has_finished(state, names):
        state.unlink()
    former = [*chosen.continue_from, *([state] if state.exists() else [])]
    results = read_states(former, mutants=mutants)
    names = [
        name
        for name in chosen.only or names
        if name not in results or results[name].outcome == "unfinished"
    ]
    # Those that have not started first: most mutants are detected within a minute.
    names.sort(key=lambda name: name in results)
    for name in names:
        results.setdefault(name, MutantResult())
    run = MutationRun(
        mutants,
        results,
        out=out,
        deadline=time.monotonic() + chosen.budget_s,
        has_cuda=chosen.cuda,
    )
    run.run(names, num_workers=chosen.workers)
    write_state(state, results)
    counts = Counter(result.outcome for result in results.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="sample mutants from the current sources")
    running = commands.add_parser("run", help="run the kit on the sampled mutants")
    running.add_argument("--out", type=Path, required=True, help="folder of the state")
    running.add_argument("--workers", type=int, default=2, help="mutants at a time; default 2")
    running.add_argument("--budget-s", type=float, default=24 * 3600.0, help="time limit")
    running.add_argument("--continue-from", type=Path, nargs="*", default=[], metavar="JSON")
    running.add_argument("--only", nargs="*", default=[], metavar="ID", help="mutants to run")
    running.add_argument("--cuda", action="store_true", help="also run survivors on a GPU")
    running.add_argument(
        "--skip-original", action="store_true", help="do not run the unchanged engine"
    )
    page = commands.add_parser("page", help="rewrite the page; fail if too few are detected")
    page.add_argument("states", type=Path, nargs="+", metavar="STATE", help="files of `run`")
    chosen = parser.parse_args(arguments)
    if chosen.command == "page":
        return _write_page(chosen.states)
    if chosen.command == "draw":
        sample = draw_sample(SOURCES, seed=SEED, num_mutants=NUM_MUTANTS)
        SAMPLE.write_text(json.dumps([asdict(mutant) for mutant in sample], indent=1) + "\n")
        return 0
    return _run(chosen)


if __name__ == "__main__":
    sys.exit(main())
