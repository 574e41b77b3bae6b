"""Try a package of this checkout with the last release of a sibling, and record what passed.

A trial runs the tests of the dependent package; if that package is the released one, its released
tests. `nox -s compat` runs the trials of a pair and writes a record to .temper/compat. `python -m
tools.compat` copies the records to tools/matrix.json, which is committed and is the source of the
site's table. `tools/release.py` accepts both. A record names the contents that were tried, so an
edit or a release invalidates it and a rebase does not.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.release_records import (
    ReleaseError,
    ReleaseSource,
    git,
    has_object,
    last_release,
    unpack_tree,
)
from tools.requirements import list_sibling_pairs, sibling_requirements_in

RECORDS = Path(".temper") / "compat"

MATRIX = Path("tools") / "matrix.json"
"""Committed records: the last passed trials of each pair."""

COUNTED = ("src", "tests", "pyproject.toml")
"""Parts of a package on which a trial can depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A dependency and its dependent, one from this checkout and the other as last released."""

    dependency: str
    dependent: str
    released: ReleaseSource
    """The release of one of the two."""
    tree: str
    """Git tree id of the release."""

    @property
    def name(self) -> str:
        """Unique name among the trials of these contents."""
        here = self.dependent if self.released.package == self.dependency else self.dependency
        return f"{here} with {self.released.package} {self.released.version} ({self.tree[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """Record of the trials of a pair that passed."""

    pair: str
    at: str
    """Time in UTC, ISO format."""
    passed: Sequence[str]
    """Names of trials."""
    contents: Mapping[str, str]
    """Hash of each package in this checkout, as `hash_contents` computes it."""
    commit: str = ""
    """Commit of the checkout, followed by `+` if files were changed; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFiles:
    """Unpacked files of a trial."""

    sources: Mapping[str, Path]
    """Folder of each package: the unpacked release of one, this checkout's of all others."""
    root: Path
    """Folder in which the tests run: this checkout, or the unpacked release."""
    tests: Path
    """Tests of the dependent package."""


def list_trials(root: Path, pair: str, *, declared: Mapping[str, str] | None = None) -> list[Trial]:
    """Return the trials of a pair, `DEPENDENCY:DEPENDENT`, whose versions pip can install together.

    `declared` gives versions to assume for packages of this checkout instead of the declared ones.

    Raises:
        ReleaseError: This clone lacks the content of a recorded release.
    """
    dependency, dependent = pair.split(":")
    trials = []
    for released in (dependent, dependency):
        source = last_release(root, released)
        if source is None:
            continue
        tree = git(root, "rev-parse", source.treeish).strip()
        if released == dependent:
            version = (declared or {}).get(dependency) or _parse_version(
                _read_pyproject(root, dependency)
            )
            pyproject = git(root, "show", f"{tree}:pyproject.toml")
        else:
            version, pyproject = source.version, _read_pyproject(root, dependent)
        specifiers = [
            each.specifier
            for each in sibling_requirements_in(pyproject)
            if each.name == f"temper-{dependency}"
        ]
        if all(version in each for each in specifiers):
            trials.append(
                Trial(dependency=dependency, dependent=dependent, released=source, tree=tree)
            )
    return trials


def unpack_trial(root: Path, trial: Trial, folder: Path) -> TrialFiles:
    """Unpack the released files of a trial, including pages that its tests read.

    Raises:
        ReleaseError: If the commit of the release is not in this clone.
    """
    source = trial.released
    if not source.commit or not has_object(root, source.commit):
        raise ReleaseError(
            f"this clone lacks the commit of {source.package} {source.version}: fetch the full "
            "history (git fetch --unshallow) or the tags (git fetch --tags), or record the commit "
            "with tools/release.py --record."
        )
    copy = folder / f"{source.package}-{source.version}"
    if not copy.exists():
        unpack_tree(
            root,
            source.commit,
            copy,
            # The tests of every package need the settings that conftest.py makes.
            paths=(
                f"packages/{source.package}",
                "docs",
                "pyproject.toml",
                "conftest.py",
                "tools/__init__.py",
                "tools/environment.py",
            ),
        )
    packages = {
        path.parent.name: path.parent for path in sorted(root.glob("packages/*/pyproject.toml"))
    }
    released = copy / "packages" / source.package
    tests_root = copy if source.package == trial.dependent else root
    tests = tests_root / "packages" / trial.dependent / "tests"
    return TrialFiles(sources=packages | {source.package: released}, root=tests_root, tests=tests)


def pytest_arguments(files: TrialFiles, chosen: Sequence[str] = ()) -> list[str]:
    """Return pytest's arguments for a trial that runs in `files.root`.

    `chosen` names tests of the dependent package; by default all run.
    """
    tests = [str(files.tests / each) for each in chosen] or [str(files.tests)]
    return ["-m", "pytest", *tests, "-m", "not nightly"]


def start_trials(root: Path, pair: str) -> None:
    """Record that trials of a pair have started with the current contents.

    From now on earlier records of this checkout do not count, until the trials pass.
    """
    _write_record(root, pair, passed=[])


def record_passed(root: Path, pair: str, passed: Sequence[Trial]) -> Path:
    """Record that these trials of a pair passed with the current contents.

    Raises:
        ReleaseError: If the contents changed since the trials started, so that it is unknown which
            contents passed.
    """
    started = _read_record(root, pair)
    changed = [] if started is None or started.passed else list_changed_packages(root, started)
    if changed:
        raise ReleaseError(
            f"{' and '.join(changed)} changed while the trials of {pair} ran, "
            "so nothing is recorded: run them again."
        )
    return _write_record(root, pair, passed=[trial.name for trial in passed])


def read_matrix(root: Path) -> list[TrialRecord]:
    """Return the committed records; none if there is no file."""
    file = root / MATRIX
    return [TrialRecord(**each) for each in json.loads(file.read_text())] if file.exists() else []


def update_matrix(root: Path) -> list[str]:
    """Copy the passed records of this checkout to `MATRIX`, and return their pairs.

    A record replaces the earlier one of its pair.
    """
    local = [
        _read_record(root, file.stem.replace("+", ":"))
        for file in sorted((root / RECORDS).glob("*.json"))
    ]
    passed = [record for record in local if record is not None and record.passed]
    records = {record.pair: record for record in [*read_matrix(root), *passed]}
    (root / MATRIX).write_text(
        json.dumps([asdict(records[pair]) for pair in sorted(records)], indent=1) + "\n"
    )
    return [record.pair for record in passed]


def find_missing_trials(root: Path, package: str, version: str) -> list[str]:
    """Return a sentence for each pair with untried changes before a package becomes `version`."""
    messages = []
    for pair in list_sibling_pairs(
        path.parent for path in sorted(root.glob("packages/*/pyproject.toml"))
    ):
        if package not in pair.split(":"):
            continue
        record = _find_passed_record(root, pair)
        changed = [] if record is None else list_changed_packages(root, record)
        passed = () if record is None or changed else record.passed
        missing = [
            trial.name
            for trial in list_trials(root, pair, declared={package: version})
            if trial.name not in passed
        ]
        if not missing:
            continue
        if record is None:
            reason = "no passed run is recorded"
        else:
            changed_names = " and ".join(changed) or "the last release"
            reason = f"{changed_names} changed since the run that passed at {record.at}"
        messages.append(f"{' and '.join(missing)}: {reason}. Run nox -s \"compat(pair='{pair}')\"")
    return messages


def hash_contents(root: Path, package: str) -> str:
    """Return a hash of a package's files on which a trial can depend, without ignored files."""
    folders = [f"packages/{package}/{each}" for each in COUNTED]
    names = git(
        root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders
    ).split("\0")
    digest = hashlib.sha256()
    for name in sorted({name for name in names if name and (root / name).is_file()}):
        digest.update(
            f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def _find_passed_record(root: Path, pair: str) -> TrialRecord | None:
    """Return the record of a pair, preferably a valid one; None if its last trials did not pass."""
    committed = next((each for each in read_matrix(root) if each.pair == pair), None)
    candidates = [each for each in (_read_record(root, pair), committed) if each is not None]
    if not candidates or not candidates[0].passed:
        return None
    return next(
        (each for each in candidates if not list_changed_packages(root, each)), candidates[0]
    )


def list_changed_packages(root: Path, record: TrialRecord) -> list[str]:
    """Return the packages whose contents differ from those of a record."""
    return [each for each, digest in record.contents.items() if hash_contents(root, each) != digest]


def _write_record(root: Path, pair: str, *, passed: Sequence[str]) -> Path:
    file = _record_path(root, pair)
    file.parent.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    hashes = {package: hash_contents(root, package) for package in pair.split(":")}
    commit = git(root, "rev-parse", "HEAD").strip() + (
        "+" if git(root, "status", "--porcelain").strip() else ""
    )
    file.write_text(
        json.dumps(
            asdict(TrialRecord(pair=pair, at=at, passed=passed, contents=hashes, commit=commit)),
            indent=1,
        )
        + "\n"
    )
    return file


def _read_record(root: Path, pair: str) -> TrialRecord | None:
    file = _record_path(root, pair)
    if not file.exists():
        return None
    try:
        return TrialRecord(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ReleaseError(
            f"{file.relative_to(root)} was not written by nox -s compat ({error}): "
            "delete it and run the session again."
        ) from None


def _record_path(root: Path, pair: str) -> Path:
    return root / RECORDS / f"{pair.replace(':', '+')}.json"


def _read_pyproject(root: Path, package: str) -> str:
    return (root / "packages" / package / "pyproject.toml").read_text()


def _parse_version(pyproject: str) -> str:
    version: str = tomllib.loads(pyproject)["project"]["version"]
    return version


if __name__ == "__main__":
    for pair in update_matrix(Path(__file__).resolve().parent.parent):
        print(f"copied the record of {pair} to {MATRIX}")
