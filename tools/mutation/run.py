"""Run the kit on mutants. This module is also the plugin of pytest that selects the tests."""

from __future__ import annotations

import argparse
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

from tools.mutation.sample import Mutant, read_equivalents, read_sample
from tools.mutation.sessions import (
    FIRST_GROUPS,
    FIRST_LAYOUTS,
    MODULES,
    QUICK_GROUPS,
    ROOT,
    SESSIONS,
    SOURCES,
    KitSession,
)
from tools.mutation.state import (
    STATE,
    MutantResult,
    has_finished,
    hash_sources,
    name_original,
    read_states,
    write_state,
)

SESSION_LIMIT_S = 1800.0
"""Time limit of one session of the kit; a mutant that exceeds it counts as detected."""

NO_TESTS = 5
"""Exit status of pytest if no test was left to run."""

SESSION_VARIABLE = "TEMPER_MUTATION_SESSION"
"""Environment variable with the tests of a session, as JSON; read by pytest's hook below."""


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
        *("-q", "--tb=short", "-W", "default", "-p", "tools.mutation.run"),
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


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("torch").split(".")[:2])


def run_sample(chosen: argparse.Namespace) -> int:
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
