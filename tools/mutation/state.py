"""Results of the kit on mutants, and the files that keep them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from tools.mutation.sample import Mutant
from tools.mutation.sessions import ROOT

STATE = "mutation.json"
"""Name of the file with the state of a run."""


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


def name_original() -> str:
    """Return the key of the results of the unchanged engine on this machine."""
    return f"unchanged with torch {version('torch').partition('+')[0]}"


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
