"""Run the tests that the changes of the working tree affect: `python3 tools/dev.py test --changed`.

A test is affected if its file imports a changed file, directly or through others. The tests nearest
in the import graph are chosen first, up to LIMIT_S, and what is left out is printed. What a test
loads by an entry point is no import, so a pull request still needs all steps.
"""

from __future__ import annotations

import argparse
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from grimp.exceptions import SourceSyntaxError

from tools.file_graph import FileGraph, build_file_graph, find_package
from tools.git_changes import Changes, ChangesError, find_changes, list_files
from tools.pages import PAGES
from tools.steps import REPORTS, STEPS, Step, print_report, run_in_parallel

LIMIT_S = 180.0
"""Expected seconds of tests at which no more are added; files that were changed always run."""

UNKNOWN_DISTANCE = 1000
"""Distance of the tests of a package whose data changed, if none of them names the data."""

MIN_BUDGET_S = 180.0
"""Smallest budget of a pytest step. A step is killed after six budgets."""

ALWAYS = ("lint", "layers")
"""Steps that run whatever has changed; `types` runs for the packages that changed."""

TEST_FOLDERS = {
    argument: step.name
    for step in STEPS
    if step.is_pytest
    for command in step.commands
    for argument in command
    if argument.startswith(("packages/", "tools/"))
}
"""Maps each folder of tests to the step of `dev.py test` that runs it."""

ENGINE_STEPS = {
    "packages/engine-fsdp": ("kit-on-fsdp",),
    "packages/engine-megatron": ("kit-on-megatron",),
    "packages/engine-api": ("kit-on-fsdp", "kit-on-megatron"),
}
"""Conformance steps that a changed package affects. They take minutes, so they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedFile:
    """A test file that the changes affect."""

    path: str
    distance: int
    """Number of imports between it and the nearest changed file; 0 if it was changed itself."""
    slow_tests: tuple[str, ...]
    """Tests marked `slow` that do not run, because the file imports no changed file directly."""
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Tests and checks that `dev.py test --changed` runs and leaves out."""

    chosen: tuple[AffectedFile, ...]
    """Nearest first."""
    left_out: tuple[AffectedFile, ...]
    """Affected test files beyond the limit."""
    slow_tests: tuple[str, ...]
    """Node ids of the slow tests that are left out although the limit may allow their files."""
    left_out_steps: tuple[str, ...]
    pages: tuple[str, ...]
    """Pages whose documentation checks run."""
    typed: tuple[str, ...]
    """Folders and files that mypy checks."""
    without_tests: tuple[str, ...]
    """Changed files that no test is known to import or read."""


def select_tests(
    changes: Changes,
    graph: FileGraph,
    *,
    pages: Mapping[str, str],
    durations: Mapping[str, Mapping[str, float]],
    limit_s: float = LIMIT_S,
) -> Selection:
    """Select the tests of the nearest files whose expected time is within the limit.

    Args:
        changes: Files that differ.
        graph: Importers of each file.
        pages: Maps the path of each documentation page to its text.
        durations: Seconds of each test of earlier runs, by test file. Others count as the mean of
            their step.
        limit_s: Expected seconds at which no more files are added.
    """
    distances = graph.compute_distances(changes.paths)
    without_tests = []
    for path in changes.paths:
        reached = graph.compute_distances([path])
        if path in pages or any(name in graph.tests for name in reached):
            continue
        package = find_package(path)
        if package and path.startswith((f"{package}/src/", f"{package}/tests/")):
            for test_file in graph.tests:
                if find_package(test_file) == package:
                    distances.setdefault(test_file, UNKNOWN_DISTANCE)
        elif path not in changes.deleted:
            without_tests.append(path)
    means = _compute_mean_seconds(graph.tests)
    affected = [
        _describe_file(
            path,
            distances[path],
            graph=graph,
            durations=durations,
            unknown_s=means[_find_step(path)],
        )
        for path in graph.tests
        if path in distances
    ]
    chosen, left_out, total_s = list[AffectedFile](), list[AffectedFile](), 0.0
    packages = {find_package(path) for path in changes.paths}

    def sort_key(file: AffectedFile) -> tuple[int, bool, float, str]:
        is_elsewhere = find_package(file.path) not in packages
        return file.distance, is_elsewhere, file.expected_s, file.path

    for file in sorted(affected, key=sort_key):
        if _has_no_test_left(file, graph=graph):
            continue
        total_s += file.expected_s
        is_chosen = file.distance == 0 or total_s <= limit_s
        (chosen if is_chosen else left_out).append(file)
    return Selection(
        chosen=tuple(chosen),
        left_out=tuple(left_out),
        slow_tests=tuple(f"{file.path}::{test}" for file in affected for test in file.slow_tests),
        left_out_steps=tuple(
            dict.fromkeys(
                step for package in sorted(packages) for step in ENGINE_STEPS.get(package, ())
            )
        ),
        pages=_find_pages(changes, pages),
        typed=_find_typed(changes),
        without_tests=tuple(without_tests),
    )


def build_steps(selection: Selection) -> list[Step]:
    """Return the steps that run a selection, named after those of `dev.py test`."""
    steps = [step for step in STEPS if step.name in ALWAYS]
    if selection.typed:
        (types,) = (step for step in STEPS if step.name == "types")
        steps.append(
            Step(
                name="types", budget_s=types.budget_s, commands=(("-m", "mypy", *selection.typed),)
            )
        )
    for name, files in _group_by_step(selection.chosen).items():
        # Node ids and not `-m "not slow"`: slow tests of directly affected files do run.
        deselected = [
            f"--deselect={file.path}::{test}" for file in files for test in file.slow_tests
        ]
        paths = [file.path for file in files]
        command = ("-m", "pytest", "-q", "-m", "not nightly", *paths, *deselected)
        budget_s = max(MIN_BUDGET_S, sum(file.expected_s for file in files))
        steps.append(
            # Another name, so that the durations of all tests in the reports stay.
            Step(name=f"changed-{name}", budget_s=budget_s, commands=(command,), is_pytest=True)
        )
    if selection.pages:
        command = ("tools/docs.py", ".", *selection.pages)
        steps.append(Step(name="docs", budget_s=150, commands=(command,)))
    return steps


def describe(changes: Changes, selection: Selection, *, is_short: bool = False) -> list[str]:
    """Return the lines that say what runs, what is left out, and how to run that.

    The short form has only the numbers of files and tests that were left out.
    """
    lines = [
        f"{len(changes.paths)} files differ from {changes.base[:12]}",
        f"{len(selection.chosen)} affected test files, steps {', '.join(ALWAYS)}"
        + (f"; types of {', '.join(selection.typed)}" if selection.typed else "")
        + (f"; {len(selection.pages)} documentation pages" if selection.pages else ""),
    ]
    lines += [f"no test is known to import or read {path}" for path in selection.without_tests]
    skipped_steps = dict.fromkeys(selection.left_out_steps)
    if selection.slow_tests:
        lines.append(
            f"left out {len(selection.slow_tests)} slow tests of files that import no changed file "
            "directly"
        )
        lines += () if is_short else [f"    {test}" for test in selection.slow_tests]
        skipped_steps |= dict.fromkeys(_find_step(test) for test in selection.slow_tests)
    for name, files in _group_by_step(selection.left_out).items():
        distance = min(file.distance for file in files)
        which = (
            "by data of the package"
            if distance == UNKNOWN_DISTANCE
            else f"over {distance} or more imports"
        )
        lines.append(
            f"left out {len(files)} test files of {name}, affected {which}: beyond the limit of "
            f"{LIMIT_S / 60:.0f} minutes"
        )
        lines += () if is_short else [f"    {path}" for path in sorted(f.path for f in files)]
        skipped_steps[name] = None
    lines += [f"left out the conformance tests {step}" for step in selection.left_out_steps]
    if skipped_steps:
        options = " ".join(f"--only {step}" for step in skipped_steps)
        lines.append(f"to run the steps of what was left out: python3 tools/dev.py test {options}")
    lines.append("to run everything that a pull request must pass: python3 tools/dev.py test")
    return [f"changed: {line}" for line in lines]


def read_durations(root: Path, tests: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the expected seconds of each test function, by test file.

    They are those of earlier runs on a host that is not used otherwise: the times of a step that
    took longer than its budget are scaled to the budget, because the clock also counts the time in
    which other programs had the cores.
    """
    by_module = {str(PurePosixPath(path).with_suffix("")).replace("/", "."): path for path in tests}
    durations: dict[str, dict[str, float]] = {}
    for step in STEPS:
        for report in sorted((root / REPORTS).glob(f"{step.name}-[0-9]*.xml")):
            try:
                cases = list(ElementTree.parse(report).iter("testcase"))
            except ElementTree.ParseError:
                continue  # a run that was killed while it wrote; times are only estimates
            total_s = sum(float(case.get("time", "0")) for case in cases)
            scale = min(1.0, step.budget_s / total_s) if total_s else 1.0
            for case in cases:
                module, groups = case.get("classname", ""), list[str]()
                while module not in by_module and "." in module:
                    module, _, group = module.rpartition(".")
                    groups.insert(0, group)
                if path := by_module.get(module):
                    name = "::".join([*groups, case.get("name", "").partition("[")[0]])
                    seconds = durations.setdefault(path, {})
                    seconds[name] = seconds.get(name, 0.0) + scale * float(case.get("time", "0"))
    return durations


def run_affected(root: Path, *, base: str | None = None) -> int:
    """Print the selection, run it, and print the table of steps; return the exit status."""
    started = time.monotonic()
    changes = find_changes(root, base=base)
    if not changes.paths:
        print(f"changed: nothing differs from {changes.base[:12]}, so there is nothing to test")
        return 0
    graph = read_graph(root, changes)
    selection = select_tests(
        changes, graph, pages=read_pages(root), durations=read_durations(root, graph.tests)
    )
    print("\n".join(describe(changes, selection)), flush=True)
    results = run_in_parallel(build_steps(selection), python=Path(sys.executable), root=root)
    # Again at the end, where it is read: a green table alone would promise too much.
    print("\n" + "\n".join(describe(changes, selection, is_short=True)))
    print_report(results, took_s=time.monotonic() - started)
    return 1 if any(result.failures for result in results) else 0


def read_graph(root: Path, changes: Changes) -> FileGraph:
    """Build the file graph of the working tree.

    Raises:
        ChangesError: If a file cannot be parsed.
    """
    files = list_files(root, "*.py")
    deleted = [path for path in changes.deleted if path.endswith(".py")]
    try:
        return build_file_graph(root, files, deleted=deleted)
    except (SyntaxError, SourceSyntaxError) as error:
        raise ChangesError(
            f"--changed cannot read the imports of a file that Python cannot parse: {error}. "
            "Fix it first."
        ) from None


def read_pages(root: Path) -> dict[str, str]:
    """Return the text of each documentation page by its path."""
    return {
        page.relative_to(root).as_posix(): page.read_text()
        for pattern in PAGES
        for page in root.glob(pattern)
    }


def _describe_file(
    path: str,
    distance: int,
    *,
    graph: FileGraph,
    durations: Mapping[str, Mapping[str, float]],
    unknown_s: float,
) -> AffectedFile:
    slow = tuple(
        test.name
        for test in graph.tests[path]
        if distance > 1 and "slow" in test.marks and "nightly" not in test.marks
    )
    known = durations.get(path)
    seconds = (
        sum(time_s for name, time_s in known.items() if name not in slow) if known else unknown_s
    )
    return AffectedFile(path=path, distance=distance, slow_tests=slow, expected_s=seconds)


def _compute_mean_seconds(tests: Iterable[str]) -> dict[str, float]:
    """Return the seconds per test file of each step, by its budget: files without a report."""
    num_files = Counter(map(_find_step, tests))
    return {step.name: step.budget_s / max(num_files[step.name], 1) for step in STEPS}


def _has_no_test_left(file: AffectedFile, *, graph: FileGraph) -> bool:
    """Return whether all tests are nightly, or slow and left out: pytest would fail with none."""
    tests = graph.tests[file.path]
    return all("nightly" in test.marks or test.name in file.slow_tests for test in tests)


def _group_by_step(files: Iterable[AffectedFile]) -> dict[str, list[AffectedFile]]:
    groups: dict[str, list[AffectedFile]] = {}
    for file in files:
        groups.setdefault(_find_step(file.path), []).append(file)
    return groups


def _find_step(path: str) -> str:
    """Return the name of the step of `dev.py test` that runs a test file."""
    folders = (folder for folder in TEST_FOLDERS if path.startswith(f"{folder}/"))
    # The longest folder, because the tests of the kit are below those of engine-api.
    return TEST_FOLDERS[max(folders, key=len)]


def _find_pages(changes: Changes, pages: Mapping[str, str]) -> tuple[str, ...]:
    """Return the changed pages, and those that name a deleted page, whose links are now broken."""
    gone = [PurePosixPath(path).name for path in changes.deleted if path.endswith(".md")]
    linking = {page for page, text in pages.items() if any(name in text for name in gone)}
    return tuple(sorted({path for path in changes.present if path in pages} | linking))


def _find_typed(changes: Changes) -> tuple[str, ...]:
    """Return what mypy checks: sources of changed packages, the tools, and changed root files."""
    typed = set()
    for path in (path for path in changes.paths if path.endswith(".py")):
        if (package := find_package(path)) and path.startswith(f"{package}/src/"):
            typed.add(f"{package}/src")
        elif path.startswith("tools/"):
            typed.add("tools")
        elif path in ("conftest.py", "noxfile.py") and path in changes.present:
            typed.add(path)
    return tuple(sorted(typed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the affected tests of this repository; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/dev.py test --changed", description=__doc__)
    parser.add_argument("--base", help="commit to compare with")
    chosen = parser.parse_args(arguments)
    try:
        return run_affected(Path(__file__).resolve().parent.parent, base=chosen.base)
    except ChangesError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dev: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
