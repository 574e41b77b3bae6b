"""The page with the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.mutation.sample import Mutant, read_equivalents, read_sample
from tools.mutation.sessions import MODULES, ROOT
from tools.mutation.state import MutantResult, read_states, write_state

RECORD = ROOT / "docs" / "records" / "mutation.json"
PAGE = ROOT / "docs" / "records" / "mutation.md"
START_OF_TABLES = "<!-- The tables below are generated. -->"
END_OF_TABLES = "<!-- Text below this line is kept. -->"

DETECTED = ("wrong result", "exception", "at import", "time limit")
"""Ways in which the kit detects a mutant."""
MAX_SURVIVORS = 0.05
"""Largest accepted fraction of mutants that are not detected."""


def render_page(
    mutants: Sequence[Mutant],
    results: Mapping[str, MutantResult],
    equivalents: Mapping[str, tuple[str, str]],
) -> str:
    """Return the generated part of the page: totals, all mutants, and the excluded ones."""
    counted = [mutant for mutant in mutants if mutant.id not in equivalents]
    by_id = {mutant.id: results.get(mutant.id, MutantResult()) for mutant in counted}
    lines = [
        f"| module | mutants | {' | '.join(DETECTED)} | survived | unfinished |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for module in (*MODULES, ""):
        verdicts = Counter(
            _verdict(by_id[mutant.id])
            for mutant in counted
            if mutant.module == (module or mutant.module)
        )
        total = sum(verdicts.values())
        if total:
            cells = [verdicts[name] for name in (*DETECTED, "survived", "unfinished")]
            row = [f"`{module}`" if module else "all", total, *cells]
            lines.append("| " + " | ".join(map(str, row)) + " |")
    num_detected = sum(result.is_detected for result in by_id.values())
    outcomes = Counter(result.outcome for result in by_id.values())
    lines += [
        "",
        (
            f"Detected: {num_detected} of {len(counted)} "
            f"({100 * num_detected // len(counted)} %). "
            f"Survived a complete run: {outcomes['survived']}. "
            f"Not run to the end since their functions changed: {outcomes['unfinished']}."
        ),
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


def write_page(paths: Sequence[Path]) -> int:
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
