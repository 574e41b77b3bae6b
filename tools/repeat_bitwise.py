"""Repeat every bit-for-bit test, on an idle host and under load, and keep a table of the results.

    python -m tools.repeat_bitwise [--times 20] [--group trainer] [--expression EXPR] [--restart]

A repetition is one pytest process that runs the tests of a group with the mark `bitwise`. Its
result is stored in docs/records/bitwise.json before the next one starts, and later calls continue
there, also at later commits: all repetitions together take several hours. After each repetition
the table of all results in docs/records/bitwise.md is replaced; the text below it is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.release_records import git

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "docs" / "records" / "bitwise.json"
REPORT = ROOT / "docs" / "records" / "bitwise.md"
END_OF_TABLE = "<!-- Text below this line is kept. -->"
JUNIT_XML = ROOT / ".temper" / "bitwise.xml"

KIT = ("--pyargs", "temper_engine_api.conformance", "--world-sizes", "1,2", "--engine")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "trainer": ("packages/trainer/tests",),
    "engine-api": ("packages/engine-api/tests",),
    "engine-fsdp": ("packages/engine-fsdp/tests",),
    "engine-megatron": ("packages/engine-megatron/tests",),
    "shim": ("packages/legacy-shim/tests",),
    "kit-on-fsdp": (*KIT, "fsdp"),
    "kit-on-megatron": (*KIT, "megatron"),
}
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


@dataclass(slots=True, kw_only=True)
class Record:
    """All repetitions, which may be of several commits."""

    commits: list[str] = field(default_factory=list)
    """Short ids of the commits that were tested, in order."""
    done: dict[str, int] = field(default_factory=dict)
    """Number of repetitions by group, condition and expression."""
    tests: dict[str, dict[str, Outcomes]] = field(default_factory=dict)
    """Outcomes by test and condition."""

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
        return cls(commits=stored["commits"], done=stored["done"], tests=tests)

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

    def table(self) -> str:
        """Return the report as Markdown."""
        num_busy = 2 * (os.cpu_count() or 1)
        lines = [
            "# Repetitions of the bit-for-bit tests",
            "",
            "Written by `nox -s bitwise`, which repeats every test with the mark `bitwise`, each",
            "time in a new process.",
            f"Under load, {num_busy} other processes compute in bursts of random length.",
            "",
            (
                f"Processor: {_read_processor_name()}, {os.cpu_count()} cores. "
                f"Last repetition: {time.strftime('%Y-%m-%d')}. "
                f"Commits: {', '.join(self.commits)}."
            ),
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
    parser.add_argument(
        "--group",
        action="append",
        choices=list(GROUPS),
        help="run only this group; may be repeated",
    )
    parser.add_argument(
        "--expression", default="", help="run only tests that this pytest -k expression selects"
    )
    parser.add_argument("--restart", action="store_true", help="discard the stored repetitions")
    chosen = parser.parse_args(arguments)
    commit = git(ROOT, "rev-parse", "--short", "HEAD").strip()
    record = Record() if chosen.restart else Record.load(STATE)
    # Iterate over repetitions first, so that an interrupted run has tried every group.
    for number in range(1, chosen.times + 1):
        for group in chosen.group or GROUPS:
            for condition in CONDITIONS:
                key = f"{group}, {condition}, {chosen.expression or 'all tests'}"
                if record.done.get(key, 0) >= number:
                    continue
                junit_xml = _repeat(group, condition=condition, expression=chosen.expression)
                if junit_xml is not None:
                    record.add(junit_xml, group=group, condition=condition)
                record.done[key] = number
                if commit not in record.commits:
                    record.commits.append(commit)
                record.save(STATE)
                _, _, text = REPORT.read_text().partition(END_OF_TABLE)
                REPORT.write_text(f"{record.table()}\n{END_OF_TABLE}{text}")
                print(f"{key}: {number} of {chosen.times}", flush=True)
    failed = {
        name
        for name, outcomes in record.tests.items()
        if any(counts.failed for counts in outcomes.values())
    }
    print(
        f"{len(record.tests)} tests, {len(failed)} of them failed at least once: {sorted(failed)}"
    )
    return 1 if failed else 0


def _repeat(group: str, *, condition: str, expression: str) -> str | None:
    """Return pytest's JUnit report of one repetition, or None if the group has no such test.

    Raises:
        RuntimeError: If pytest wrote no report.
    """
    JUNIT_XML.parent.mkdir(parents=True, exist_ok=True)
    JUNIT_XML.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "bitwise",
        "--timeout",
        "3600",
        f"--junitxml={JUNIT_XML}",
    ]
    command += ["-k", expression] if expression else []
    command += _list_pytest_arguments(group)
    with _keep_busy(2 * (os.cpu_count() or 1) if condition == "under load" else 0):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == NO_TESTS:
        return None
    if done.returncode not in (0, 1) or not JUNIT_XML.exists():
        raise RuntimeError(
            f"pytest exited with status {done.returncode}, expected 0 or 1:\n"
            f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    if done.returncode == 1:
        print(done.stdout[-8000:], flush=True)
    return JUNIT_XML.read_text()


def _list_pytest_arguments(group: str) -> list[str]:
    """Return pytest's arguments for a group.

    Of a folder, only files with marked tests are listed, because importing all takes most of the
    time.
    """
    arguments: list[str] = []
    for argument in GROUPS[group]:
        folder = ROOT / argument
        if folder.is_dir():
            files = sorted(folder.rglob("test_*.py"))
            arguments += [
                str(file) for file in files if "mark.bitwise" in file.read_text(encoding="utf-8")
            ]
        else:
            arguments.append(argument)
    return arguments


@contextmanager
def _keep_busy(num_processes: int) -> Iterator[None]:
    """Keep this many processes computing while the body runs."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM]) for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read_processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


if __name__ == "__main__":
    sys.exit(main())
