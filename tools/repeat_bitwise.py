"""Repeat every bit-for-bit test, on an idle host and under load, and keep a table of the results.

    python -m tools.repeat_bitwise [--times 20] [--group trainer] [--expression EXPR] [--restart]
    python -m tools.repeat_bitwise --parallel 8 --budget-s 500 --record FILE   # on a larger host
    python -m tools.repeat_bitwise --parallel 24 --share-processors --condition "under load"
    python -m tools.repeat_bitwise --add FILE                                 # its results

A pytest process runs the tests of one file with the mark `bitwise`, or the conformance kit, five
times in a row (`--per-process`). A new process each time would pay for imports, compilation and
start-up again; one process for all 20 would hide what differs between processes, as addresses do.
In one process, the fixtures of a module (Ray, rank processes) are made again for each repetition.

Results are stored in docs/records/bitwise.json as soon as a process ends, and later calls run only
the tests that have fewer repetitions, also at later commits: all together take several hours. Then
the table of all results in docs/records/bitwise.md is replaced; the text below it is kept.

With `--parallel N`, N processes run at the same time, each on its own part of the processors. Under
load, other programs compute on that part, which wastes two thirds of it. With `--share-processors`,
more repetitions than processors run on all of them and are each other's load.

With `--apart`, each test has its own processes: for tests that take minutes, since a process that
the budget stops loses its repetitions.

The groups engine-api and engine-fsdp also run on a host where Temper is not installed. It needs
torch, blake3, transformers, peft, pytest and hypothesis,
`PYTHONPATH=packages/engine-api/src:packages/engine-fsdp/src`, and without git `TEMPER_COMMIT`.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tools.release_records import git

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "docs" / "records" / "bitwise.json"
REPORT = ROOT / "docs" / "records" / "bitwise.md"
END_OF_TABLE = "<!-- Text below this line is kept. -->"
KIT = ("--pyargs", "temper_engine_api.conformance")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "trainer": ("packages/trainer/tests",),
    "engine-api": ("packages/engine-api/tests",),
    "engine-fsdp": ("packages/engine-fsdp/tests",),
    "engine-megatron": ("packages/engine-megatron/tests",),
    "shim": ("packages/legacy-shim/tests",),
    "kit-on-fsdp": ("--world-sizes", "1,2", "--engine", "fsdp", *KIT),
    "kit-on-megatron": ("--world-sizes", "1,2", "--engine", "megatron", *KIT),
}
"""pytest's arguments for each group; the last one is the tests that are repeated."""
SKIPPED = ("test_faults.py",)
"""Files whose tests are repeated elsewhere: the fault campaign repeats them with other seeds."""
CONDITIONS = ("idle", "under load")

BUSY_PROGRAM = """
import os, random, time
random.seed()
parent = os.getppid()
while os.getppid() == parent:
    until = time.monotonic() + random.random() * 0.3
    while time.monotonic() < until:
        sum(range(1000))
    time.sleep(random.random() * 0.1)
"""
"""Computes in bursts of random length, so that the tests' threads interleave differently each time.

It exits with the process that started it, even if that process is killed.
"""

NO_TESTS = 5
"""Exit status of pytest if no test was collected."""


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """Results of one test under one condition."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        """Number of repetitions; skips count only while the test has run on no host."""
        return self.passed + self.failed or self.skipped


@dataclass(slots=True, kw_only=True)
class Record:
    """All repetitions, which may be of several commits."""

    commits: list[str] = field(default_factory=list)
    """Short ids of the commits that were tested, in order."""
    tests: dict[str, dict[str, Outcomes]] = field(default_factory=dict)
    """Outcomes by test and condition."""
    hosts: list[str] = field(default_factory=list)
    """Processor, number of cores, and torch version of each host that ran repetitions."""

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Return the stored record, or an empty one."""
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text())
        tests = {
            name: {condition: Outcomes(**counts) for condition, counts in outcomes.items()}
            for name, outcomes in stored["tests"].items()
        }
        return cls(**stored | {"tests": tests})

    def save(self, path: Path) -> None:
        """Replace the file atomically, so that a killed run keeps the previous version."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    def add(self, junit_xml: str, *, group: str, condition: str) -> None:
        """Count the tests of one pytest report; the kit's tests are counted by engine."""
        for case in ElementTree.fromstring(junit_xml).iter("testcase"):
            name = f"{group}: {case.get('classname')}::{case.get('name')}"
            counts = self.tests.setdefault(name, {}).setdefault(condition, Outcomes())
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                counts.failed += 1
            elif "skipped" in kinds:
                counts.skipped += 1
            else:
                counts.passed += 1

    def count(self, name: str, condition: str) -> int:
        """Return the number of repetitions of one test under one condition."""
        return self.tests.get(name, {}).get(condition, Outcomes()).total

    def merge(self, other: "Record") -> None:
        """Add the repetitions of another host."""
        for name, outcomes in other.tests.items():
            for condition, added in outcomes.items():
                counts = self.tests.setdefault(name, {}).setdefault(condition, Outcomes())
                counts.passed += added.passed
                counts.failed += added.failed
                counts.skipped += added.skipped
        self.commits += [commit for commit in other.commits if commit not in self.commits]
        self.hosts += [host for host in other.hosts if host not in self.hosts]

    def table(self) -> str:
        """Return the report as Markdown."""
        lines = [
            "# Repetitions of the bit-for-bit tests",
            "",
            "Written by `nox -s bitwise`, which repeats every test with the mark `bitwise`, in",
            "several processes with up to five repetitions each.",
            "Under load, two other processes per processor compute in bursts of random length,",
            "or more repetitions than processors run at the same time.",
            "",
            *(f"Host: {host}." for host in self.hosts),
            "",
            f"Last repetition: {time.strftime('%Y-%m-%d')}. Commits: {', '.join(self.commits)}.",
            "",
            "| test | idle host: passed | failed | under load: passed | failed |",
            "|---|---|---|---|---|",
        ]
        never_ran = []
        for name, by_condition in sorted(self.tests.items()):
            counts = [by_condition.get(condition, Outcomes()) for condition in CONDITIONS]
            if not any(count.passed or count.failed for count in counts):
                never_ran.append(name)
                continue
            cells = " | ".join(f"{count.passed} | {count.failed}" for count in counts)
            lines.append(f"| `{name}` | {cells} |")
        if never_ran:
            lines += [
                "",
                "Always skipped on this machine: "
                + ", ".join(f"`{name}`" for name in never_ran)
                + ".",
            ]
        return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing repetitions; return 1 if any test ever failed, else 0."""
    parser = argparse.ArgumentParser(prog="tools.repeat_bitwise", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="repetitions under each condition")
    parser.add_argument("--per-process", type=int, default=5, help="repetitions in one process")
    parser.add_argument(
        "--group",
        action="append",
        choices=list(GROUPS),
        help="run only this group; may be repeated",
    )
    parser.add_argument(
        "--expression", default="", help="run only tests that this pytest -k expression selects"
    )
    parser.add_argument(
        "--file",
        action="append",
        help="collect only this test file of the group; may be repeated",
    )
    parser.add_argument("--restart", action="store_true", help="discard the stored repetitions")
    parser.add_argument(
        "--condition", choices=CONDITIONS, action="append", help="run only under this condition"
    )
    parser.add_argument("--parallel", type=int, default=1, help="processes at the same time")
    parser.add_argument(
        "--share-processors",
        action="store_true",
        help="as load, run more repetitions than processors on all of them",
    )
    parser.add_argument("--apart", action="store_true", help="run each test in its own processes")
    parser.add_argument("--budget-s", type=float, help="stop repetitions after this many seconds")
    parser.add_argument("--record", type=Path, default=STATE, help="file of the results")
    parser.add_argument("--add", type=Path, help="only add the record of another host")
    chosen = parser.parse_args(arguments)
    if chosen.share_processors:
        num_processors = len(os.sched_getaffinity(0))
        if chosen.condition != ["under load"] or chosen.parallel <= num_processors:
            parser.error(
                "--share-processors makes repetitions compete: it needs --condition 'under load' "
                f"and --parallel above the number of processors, {num_processors}"
            )
    record = Record() if chosen.restart else Record.load(chosen.record)
    if chosen.add:
        record.merge(Record.load(chosen.add))
        _store(record, chosen.record)
    else:
        _run_missing(record, chosen)
    failed = {
        name
        for name, outcomes in record.tests.items()
        if any(counts.failed for counts in outcomes.values())
    }
    print(
        f"{len(record.tests)} tests, {len(failed)} of them failed at least once: {sorted(failed)}"
    )
    return 1 if failed else 0


def _run_missing(record: Record, chosen: argparse.Namespace) -> None:
    """Run the missing repetitions and store the result of each one."""
    # Without git, as on a host that only has the files, the caller names the commit.
    commit = os.environ.get("TEMPER_COMMIT") or git(ROOT, "rev-parse", "--short", "HEAD").strip()
    record.commits += [commit] if commit not in record.commits else []
    record.hosts += [host for host in (_describe_host(),) if host not in record.hosts]
    deadline = time.monotonic() + (chosen.budget_s or float("inf"))
    storing = threading.Lock()
    free_groups = (
        [os.sched_getaffinity(0)] * chosen.parallel
        if chosen.share_processors
        else _divide_processors(chosen.parallel)
    )

    def repeat(group: str, unit: Sequence[str], condition: str, times: int) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        processors = free_groups.pop()
        has_load = condition == "under load" and not chosen.share_processors
        try:
            with _keep_busy(processors, num_programs=2 * len(processors) if has_load else 0):
                junit_xml = repeat_tests(
                    unit,
                    expression=chosen.expression,
                    times=times,
                    processors=processors,
                    limit_s=left,
                )
        except subprocess.TimeoutExpired:
            print(f"{unit[-1]}: stopped, the time is over", flush=True)
            return
        finally:
            free_groups.append(processors)
        with storing:
            record.add(junit_xml, group=group, condition=condition)
            _store(record, chosen.record)
            print(f"{group}: {unit[-1]}, {condition}: {times} more", flush=True)

    missing = [
        (round_number, group, unit, condition, times)
        for group in chosen.group or GROUPS
        for arguments, tests in _collect_units(group, chosen.expression, chosen.file or ()).items()
        for condition in chosen.condition or CONDITIONS
        for round_number, (unit, times) in enumerate(
            _list_processes(record, group, arguments, tests, condition, chosen)
        )
    ]
    # The first repetitions of all files come first, so that an interrupted run has tried every one.
    missing.sort(key=lambda process: process[0])
    finished = threading.Event()

    def compute_until_finished() -> None:
        with _keep_busy(os.sched_getaffinity(0), num_programs=2):
            finished.wait()

    with ThreadPoolExecutor(chosen.parallel) as pool:
        pending = [
            pool.submit(repeat, group, unit, condition, times)
            for _, group, unit, condition, times in missing
        ]
        if chosen.share_processors:
            # The last repetitions have fewer others to compete with, so programs replace those.
            for _ in range(chosen.parallel - 1):
                pool.submit(compute_until_finished)
        try:
            for result in pending:
                result.result()
        finally:
            finished.set()


def _list_processes(
    record: Record,
    group: str,
    arguments: Sequence[str],
    tests: Sequence[str],
    condition: str,
    chosen: argparse.Namespace,
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield pytest's arguments and the repetitions of each process that a unit still needs."""
    missing = {
        test: chosen.times - record.count(_name_test(group, test), condition) for test in tests
    }
    separate = [{test: number} for test, number in missing.items()] if chosen.apart else [missing]
    for selected, times in itertools.chain.from_iterable(
        split_repetitions(each, per_process=chosen.per_process) for each in separate
    ):
        complete = [
            f"--deselect={test}"
            for test in tests
            # pytest deselects whatever begins like this.
            if not any(other.startswith(test) for other in selected)
        ]
        *options, path = arguments
        yield (*options, *complete, path), times


def split_repetitions(
    missing: Mapping[str, int], *, per_process: int
) -> list[tuple[tuple[str, ...], int]]:
    """Divide the missing repetitions into processes; return the tests and repetitions of each.

    Example:
        >>> split_repetitions({"a": 8, "b": 2, "c": 0}, per_process=5)
        [(('a', 'b'), 2), (('a',), 5), (('a',), 1)]
    """
    processes = []
    left = {test: number for test, number in missing.items() if number > 0}
    while left:
        times = min(per_process, *left.values())
        processes.append((tuple(left), times))
        left = {test: number - times for test, number in left.items() if number > times}
    return processes


def _name_test(group: str, test: str) -> str:
    """Return the name of a test in the record, as in JUnit reports, from its id in pytest."""
    path, _, name = test.partition("::")
    return f"{group}: {path.removesuffix('.py').replace('/', '.')}::{name}"


def _store(record: Record, path: Path) -> None:
    """Save the record and, if it is the one of the repository, the page that shows it."""
    record.save(path)
    if path == STATE:
        _, _, text = REPORT.read_text().partition(END_OF_TABLE)
        REPORT.write_text(f"{record.table()}\n{END_OF_TABLE}{text}")


def _divide_processors(num_groups: int) -> list[set[int]]:
    """Divide the processors of this process into groups of equal size."""
    processors = sorted(os.sched_getaffinity(0))
    size = max(1, len(processors) // num_groups)
    return [
        {processors[(first * size + index) % len(processors)] for index in range(size)}
        for first in range(num_groups)
    ]


def repeat_tests(
    unit: Sequence[str],
    *,
    expression: str,
    times: int,
    processors: set[int],
    limit_s: float,
) -> str:
    """Repeat the tests in one process; return pytest's JUnit report.

    Raises:
        RuntimeError: If pytest wrote no report.
        subprocess.TimeoutExpired: If it takes longer than limit_s.
    """
    folder = Path(tempfile.mkdtemp(prefix="temper-bitwise-"))
    junit_xml = folder / "report.xml"
    command = ["taskset", "--cpu-list", ",".join(map(str, sorted(processors)))]
    command += [sys.executable, "-m", "pytest", "-q", "-m", "bitwise"]
    # Another host may lack this plugin; there, `--budget-s` limits the time.
    command += ["--timeout", "3600"] if find_spec("pytest_timeout") else []
    command += ["-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    command += [f"--junitxml={junit_xml}"]
    command += ["-k", expression] if expression else []
    *options, tests = unit
    # pytest collects each argument again, so each repetition has its own fixtures of a module.
    command += [*options, "--keep-duplicates", *[tests] * times]
    output = folder / "output.txt"
    try:
        with output.open("w") as to:
            # Its own session and no pipe: what the tests started must not delay the end.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | _make_variables(folder),
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(None if limit_s == float("inf") else limit_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed = output.read_text(errors="replace")[-8000:]
        if status not in (0, 1) or not junit_xml.exists():
            raise RuntimeError(f"pytest exited with status {status}, expected 0 or 1:\n{printed}")
        report = junit_xml.read_text()
        if status == 1:
            # The end of the output may be warnings alone.
            print(printed, *_describe_failures(report), sep="\n", flush=True)
        return report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _describe_failures(junit_xml: str) -> list[str]:
    """Return a line for each failed test of a JUnit report, with its exception."""
    return [
        f"{case.get('name')}: {child.get('message', '')[:500]}"
        for case in ElementTree.fromstring(junit_xml).iter("testcase")
        for child in case
        if child.tag in ("failure", "error")
    ]


def _make_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a pytest process with its own temporary folder."""
    return {
        # On busy cores, threads that spin while they wait take 2.6 times the CPU time. How they
        # wait changes no number: the work is divided by the number of threads.
        "OMP_WAIT_POLICY": "passive",
        # The tests compare results of the CPU, and some libraries take a GPU if they see one.
        "CUDA_VISIBLE_DEVICES": "",
        # Otherwise Ray would connect to the cluster of a process that runs at the same time.
        "RAY_TMPDIR": str(folder),
    }


def _collect_units(
    group: str, expression: str, files: Sequence[str]
) -> dict[tuple[str, ...], list[str]]:
    """Return the ids of a group's tests by the arguments with which pytest repeats them.

    A unit is a file or, in the kit, all tests: they share the processes of its ranks.

    Args:
        group: Key of GROUPS.
        expression: pytest's expression that selects tests; empty for all.
        files: The only files to collect; empty for all. Not for the kit.

    Raises:
        RuntimeError: If pytest cannot collect them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "bitwise"]
    command += ["-p", "no:cacheprovider", *(["-k", expression] if expression else [])]
    collected = subprocess.run(
        [*command, *(files or GROUPS[group])], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if collected.returncode not in (0, NO_TESTS):
        raise RuntimeError(f"pytest cannot collect the tests of {group}:\n{collected.stdout}")
    units: dict[tuple[str, ...], list[str]] = {}
    for test in collected.stdout.splitlines():
        path, separator, _ = test.partition("::")
        if not separator or Path(path).name in SKIPPED:
            continue
        is_folder = (ROOT / GROUPS[group][-1]).is_dir()
        units.setdefault((path,) if is_folder else GROUPS[group], []).append(test)
    return units


@contextmanager
def _keep_busy(processors: set[int], *, num_programs: int) -> Iterator[None]:
    """Keep a number of processes computing on the processors while the body runs."""
    processor_list = ",".join(map(str, sorted(processors)))
    processes = [
        subprocess.Popen(
            ["taskset", "--cpu-list", processor_list, sys.executable, "-c", BUSY_PROGRAM]
        )
        for _ in range(num_programs)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _describe_host() -> str:
    """Return the processor, the number of cores, and the versions of Python and torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{next(names, 'unknown')}, {os.cpu_count()} cores, Python {python}, "
        f"torch {version('torch')}"
    )


if __name__ == "__main__":
    sys.exit(main())
