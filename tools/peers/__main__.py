"""Run the tests of other projects and the numerical comparisons, and print both tables.

`python -m tools.peers verl=PATH slime=PATH ...` takes checkouts. `--write` replaces the tables in
docs/records/peers.md. The exit status is 1 if a test fails without a reason in deliberate.toml, a
listed one passes, or a comparison differs by more than float rounding.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.peers.comparisons import COMPARISONS, compare_all, format_comparisons
from tools.peers.suites import SUITES, Suite

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "records" / "peers.md"
_MARKS = "<!-- {}: {} -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """Outcomes of the tests of one project."""

    commit: str
    passed: int
    no_counterpart: tuple[str, ...]
    """Functions that were asked for, one entry for each skipped test."""
    deliberate: Mapping[str, str]
    """Reasons by test."""
    failed: Mapping[str, str]
    """Messages by test of those that failed without a reason."""
    unexpected: tuple[str, ...]
    """Listed tests that passed."""


def run_suite(name: str, checkout: Path) -> SuiteResult:
    """Run the test files of one project in a process of its own."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        run = subprocess.run(
            _build_command(suite, checkout),
            cwd=checkout,
            env=os.environ
            | {
                "TEMPER_PEER": name,
                "TEMPER_PEER_RESULTS": str(results),
                "PYTHONPATH": os.pathsep.join(
                    [str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")]
                ),
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",  # a compiled function is slower than these tests
                "CUDA_VISIBLE_DEVICES": "",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if not results.exists() or run.returncode not in (0, 1):
            raise SystemExit(f"the tests of {name} did not run:\n{run.stdout}\n{run.stderr}")
        outcomes = json.loads(results.read_text())
    reasons = tomllib.loads((HERE / "deliberate.toml").read_text()).get(name, {})
    return _classify(outcomes, reasons=reasons, commit=_read_commit(checkout))


def _build_command(suite: Suite, checkout: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-p", "tools.peers.plugin", "-q", "-c", os.devnull),
        *("--rootdir", str(checkout), "-p", "no:cacheprovider", "-W", "ignore", "--tb", "line"),
        *(f"--deselect={test}" for test in suite.deselected),
        *suite.arguments,
        *suite.files,
    ]


def _classify(
    outcomes: Mapping[str, Mapping[str, str]], *, reasons: Mapping[str, str], commit: str
) -> SuiteResult:
    def find_reason(test: str) -> str | None:
        return next((r for end, r in reasons.items() if fnmatchcase(test, f"*{end}")), None)

    failed = {
        test: each["detail"] for test, each in outcomes.items() if each["outcome"] == "failed"
    }
    passed = [test for test, each in outcomes.items() if each["outcome"] == "passed"]
    return SuiteResult(
        commit=commit,
        passed=len(passed),
        no_counterpart=tuple(
            re.sub(r"^Skipped: (no counterpart: )?", "", each["detail"])
            for each in outcomes.values()
            if each["outcome"] == "skipped"
        ),
        deliberate={test: reason for test in failed if (reason := find_reason(test))},
        failed={test: detail for test, detail in failed.items() if not find_reason(test)},
        unexpected=tuple(test for test in passed if find_reason(test)),
    )


def _read_commit(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h, %cs"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def format_results(results: Mapping[str, SuiteResult]) -> str:
    """Return the table of all suites, and the reasons."""
    lines = [
        "| project | commit | passed | no counterpart | failed deliberately | failed |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        lines.append(
            f"| [{name}]({SUITES[name].repository}) | {each.commit} | {each.passed} | "
            f"{len(each.no_counterpart)} | {len(each.deliberate)} | {len(each.failed)} |"
        )
    lines += [
        "",
        "| project | test, or what has no counterpart | tests | reason |",
        "|---|---|---|---|",
    ]
    for name, each in results.items():
        for test, reason in each.deliberate.items():
            lines.append(f"| {name} | `{test.rpartition('::')[2]}` | 1 | {reason} |")
        for detail, count in sorted(Counter(each.no_counterpart).items()):
            lines.append(f"| {name} | `{detail}` | {count} | no counterpart |")
    return "\n".join(lines)


def write_page(tables: Mapping[str, str]) -> None:
    """Replace the tables between the marks of the page."""
    text = PAGE.read_text()
    for name, table in tables.items():
        begin, end = _MARKS.format("begin", name), _MARKS.format("end", name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    PAGE.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything for the given checkouts."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_written = "--write" in words
    checkouts = dict(word.split("=", 1) for word in words if word != "--write")
    # Of some projects only functions are compared.
    known = dict.fromkeys([*SUITES, *(each.project for each in COMPARISONS)])
    unknown = set(checkouts) - set(known)
    if unknown or not checkouts:
        given = ", ".join(sorted(unknown)) or "nothing"
        print(f"peers: {given} given: give checkouts as NAME=PATH, of {', '.join(known)}")
        return 2
    paths = {name: Path(path).resolve() for name, path in checkouts.items()}
    results = {name: run_suite(name, path) for name, path in paths.items() if name in SUITES}
    comparisons = compare_all(paths)
    tables = {
        "tests": format_results(results),
        "numbers": format_comparisons(comparisons),
    }
    print(f"{datetime.date.today()}\n\n" + "\n\n".join(tables.values()))
    problems = [
        *(f"{test}: {detail}" for each in results.values() for test, detail in each.failed.items()),
        *(f"{test} passes, but is listed" for each in results.values() for test in each.unexpected),
        *(f"{each.name} differs" for each in comparisons if not each.agrees),
    ]
    print("\n".join(problems) or "peers: no failure without a reason, and all numbers agree")
    if is_written:
        write_page({"date": f"Last run: {datetime.date.today()}.", **tables})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
