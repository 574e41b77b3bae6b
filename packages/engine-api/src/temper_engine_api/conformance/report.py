"""What runs of the kit found, for people: a matrix of groups by layout, for one engine or several side by side."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from temper_engine_api.conformance.results import GROUPS, Findings, Outcome, from_json, joined


def summary_of(findings: Findings) -> Iterator[str]:
    """The matrix for a terminal."""
    width = max(14, *(len(name) + 2 for name in findings.layouts))
    yield "group".ljust(15) + "".join(name.rjust(width) for name in findings.layouts)
    for group in GROUPS:
        yield group.ljust(15) + "".join(
            _cell(findings, group, name).rjust(width) for name in findings.layouts
        )
    if findings.unclaimed:
        yield f"not claimed, so refused instead: {len(findings.unclaimed)} laws"
    yield f"{findings.engine} {findings.verdict}"


def render(runs: Sequence[Findings]) -> str:
    """The report of one run, or of several side by side, as markdown."""
    engines = " and ".join(f"`{run.engine}`" for run in runs)
    lines = [f"# Conformance of {engines}", ""]
    lines += [
        f"It {run.verdict}." if len(runs) == 1 else f"* `{run.engine}` {run.verdict}."
        for run in runs
    ]
    lines += ["", *_version_table(runs), "", *_matrix(runs)]
    for run in runs:
        lines += _lists(run, of="" if len(runs) == 1 else f" of `{run.engine}`")
    return "\n".join(lines) + "\n"


def _version_table(runs: Sequence[Findings]) -> Iterator[str]:
    yield "| |" + "".join(
        f" version{'' if len(runs) == 1 else f' ({run.engine})'} |" for run in runs
    )
    yield "|---" * (1 + len(runs)) + "|"
    for name in dict.fromkeys(name for run in runs for name in run.versions):
        yield f"| {name} |" + "".join(f" {run.versions.get(name, '-')} |" for run in runs)


def _matrix(runs: Sequence[Findings]) -> Iterator[str]:
    columns = [(run, name) for run in runs for name in run.layouts]
    heads = [name if len(runs) == 1 else f"{run.engine} {name}" for run, name in columns]
    yield "| group | about | " + " | ".join(heads) + " |"
    yield "|---" * (2 + len(columns)) + "|"
    for group, meaning in GROUPS.items():
        cells = " | ".join(_cell(run, group, name) for run, name in columns)
        yield f"| {group}{'' if meaning.is_mandatory else ' (optional)'} | {meaning.about} | {cells} |"


def _lists(findings: Findings, *, of: str) -> Iterator[str]:
    yield from _list_of(
        f"Broken{of}", [f"`{f.law}`: {f.detail}" for f in findings.of_outcome(Outcome.BROKEN)]
    )
    yield from _list_of(
        f"Expected failures{of}",
        [f"`{f.law}`: {f.detail}" for f in findings.of_outcome(Outcome.EXPECTED)],
    )
    yield from _list_of(f"Not claimed{of}", [f"`{law}`" for law in findings.unclaimed])
    yield from _list_of(
        f"Laws{of}", [f"{law}: {count}" for law, count in _instances(findings).items()]
    )


def _instances(findings: Findings) -> dict[str, str]:
    """How often each law ran and held."""
    ran = Counter(finding.law.partition("[")[0] for finding in findings.found)
    held = Counter(finding.law.partition("[")[0] for finding in findings.of_outcome(Outcome.HELD))
    return {f"`{law}`": f"{held[law]} of {count}" for law, count in ran.items()}


def _cell(findings: Findings, group: str, layout: str) -> str:
    counts = {outcome: findings.count(group, layout, outcome) for outcome in Outcome}
    if not any(counts.values()):
        return "-"
    total = sum(counts.values())
    notes = [
        f"{counts[o]} {word}"
        for o, word in ((Outcome.BROKEN, "broken"), (Outcome.EXPECTED, "expected"))
        if counts[o]
    ]
    return f"{counts[Outcome.HELD]}/{total}" + (f" ({', '.join(notes)})" if notes else "")


def _list_of(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    return ["", f"## {title}", "", *(f"* {entry}" for entry in entries)] if entries else []


def main(arguments: list[str] | None = None) -> int:
    """Write the report; 2 where a file holds no findings, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m temper_engine_api.conformance.report", description=__doc__
    )
    parser.add_argument("findings", nargs="+", type=Path, help="what --findings wrote")
    parser.add_argument("--report", required=True, type=Path, help="markdown file to write")
    chosen = parser.parse_args(arguments)
    runs: list[Findings] = []
    for path in chosen.findings:
        try:
            runs.append(from_json(path.read_text()))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
    chosen.report.write_text(render(joined(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
