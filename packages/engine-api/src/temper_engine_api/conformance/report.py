"""Reports of conformance runs: a table of groups by layout, for one engine or several.

``python -m temper_engine_api.conformance.report A.json B.json --report PATH`` combines the results
of several runs. Runs of one engine in different layouts count as one.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from temper_engine_api.conformance.results import (
    GROUPS,
    ConformanceRun,
    Outcome,
    from_json,
    merge_runs,
)


def format_summary(run: ConformanceRun) -> Iterator[str]:
    """Yield the lines of the table for a terminal."""
    width = max(14, *(len(name) + 2 for name in run.layouts))
    yield "group".ljust(15) + "".join(name.rjust(width) for name in run.layouts)
    for group in GROUPS:
        yield group.ljust(15) + "".join(
            _cell(run, group, name).rjust(width) for name in run.layouts
        )
    if run.unclaimed:
        yield f"tests of unclaimed capabilities, left out: {len(run.unclaimed)}"
    yield f"{run.engine} {run.verdict}"


def render_report(runs: Sequence[ConformanceRun]) -> str:
    """Render one run, or several next to each other, as markdown."""
    engines = " and ".join(f"`{run.engine}`" for run in runs)
    lines = [f"# Conformance of {engines}", ""]
    lines += [
        f"It {run.verdict}." if len(runs) == 1 else f"* `{run.engine}` {run.verdict}."
        for run in runs
    ]
    lines += ["", *_version_table(runs), "", *_matrix(runs)]
    for run in runs:
        lines += _format_lists(run, suffix="" if len(runs) == 1 else f" of `{run.engine}`")
    return "\n".join(lines) + "\n"


def _version_table(runs: Sequence[ConformanceRun]) -> Iterator[str]:
    yield "| |" + "".join(
        f" version{'' if len(runs) == 1 else f' ({run.engine})'} |" for run in runs
    )
    yield "|---" * (1 + len(runs)) + "|"
    for name in dict.fromkeys(name for run in runs for name in run.versions):
        yield f"| {name} |" + "".join(f" {run.versions.get(name, '-')} |" for run in runs)


def _matrix(runs: Sequence[ConformanceRun]) -> Iterator[str]:
    columns = [(run, name) for run in runs for name in run.layouts]
    heads = [name if len(runs) == 1 else f"{run.engine} {name}" for run, name in columns]
    yield "| group | about | " + " | ".join(heads) + " |"
    yield "|---" * (2 + len(columns)) + "|"
    for group, group_info in GROUPS.items():
        cells = " | ".join(_cell(run, group, name) for run, name in columns)
        name = group if group_info.is_mandatory else f"{group} (optional)"
        yield f"| {name} | {group_info.about} | {cells} |"


def _format_lists(run: ConformanceRun, *, suffix: str) -> Iterator[str]:
    yield from _format_list(
        f"Failed{suffix}", [f"`{f.test}`: {f.detail}" for f in run.with_outcome(Outcome.FAILED)]
    )
    yield from _format_list(
        f"Expected failures{suffix}",
        [f"`{f.test}`: {f.detail}" for f in run.with_outcome(Outcome.EXPECTED_FAILURE)],
    )
    yield from _format_list(f"Not claimed{suffix}", [f"`{test}`" for test in run.unclaimed])
    yield from _format_list(
        f"Tests{suffix}", [f"{test}: {count}" for test, count in _instances(run).items()]
    )


def _instances(run: ConformanceRun) -> dict[str, str]:
    """Return, by test, how many of its instances passed."""
    ran = Counter(result.test.partition("[")[0] for result in run.results)
    passed = Counter(result.test.partition("[")[0] for result in run.with_outcome(Outcome.PASSED))
    return {f"`{test}`": f"{passed[test]} of {count}" for test, count in ran.items()}


def _cell(run: ConformanceRun, group: str, layout: str) -> str:
    counts = {outcome: run.count(group, layout, outcome) for outcome in Outcome}
    if not any(counts.values()):
        return "-"
    total = sum(counts.values())
    notes = [
        f"{counts[o]} {word}"
        for o, word in ((Outcome.FAILED, "failed"), (Outcome.EXPECTED_FAILURE, "expected"))
        if counts[o]
    ]
    return f"{counts[Outcome.PASSED]}/{total}" + (f" ({', '.join(notes)})" if notes else "")


def _format_list(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    return ["", f"## {title}", "", *(f"* {entry}" for entry in entries)] if entries else []


def main(arguments: list[str] | None = None) -> int:
    """Write the report; return 2 if a file does not contain results, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m temper_engine_api.conformance.report", description=__doc__
    )
    parser.add_argument("results", nargs="+", type=Path, help="files written by --results")
    parser.add_argument("--report", required=True, type=Path, help="markdown file to write")
    chosen = parser.parse_args(arguments)
    runs: list[ConformanceRun] = []
    for path in chosen.results:
        try:
            runs.append(from_json(path.read_text()))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
    chosen.report.write_text(render_report(merge_runs(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
