"""Read releases from tags, or from tools/releases.toml in a clone without tags.

A release commit cannot contain its own id. It records the git tree of the package's folder instead,
which no rebase changes; `record_commits` adds the commit id in a later commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from packaging.version import Version

RECORDS = Path("tools") / "releases.toml"

HEADER = """\
# Every release, oldest first, for clones without tags. tools/release.py writes this file.
# tag: git tag of the commit, in clones that have tags.
# tree: git tree id of the package's folder at the release.
# commit: the release commit, recorded after it was made.
# withdrawn: why the release was withdrawn; its content stays recorded, its version is not reused.
# sha256: hashes of the built files. `tools/release.py PACKAGE VERSION --verify` builds them again
# from the tree and compares.
"""


class ReleaseError(RuntimeError):
    """Raised if a package cannot be released; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRecord:
    """One entry of tools/releases.toml."""

    package: str
    """Name of the folder below packages/."""
    version: str
    date: str
    """Date of the changelog's entry, YYYY-MM-DD; SOURCE_DATE_EPOCH is midnight of it in UTC."""
    tree: str
    """Git tree id of the package's folder."""
    commit: str = ""
    """Id of the release commit; empty until `record_commits` has found it."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each built file, by file name."""
    untried: str = ""
    """Reason for a release without a passed run of `nox -s compat`; empty if there was one."""
    withdrawn: str = ""
    """Reason for the withdrawal of the release; empty if it is valid."""

    @property
    def tag(self) -> str:
        """Name of the git tag."""
        return f"{self.package}/v{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSource:
    """Location of a release's files in this clone."""

    package: str
    version: str
    treeish: str
    """Argument of `git archive` that names the package's folder."""
    commit: str
    """Tag or recorded commit of the release; empty if neither is known."""


def read_records(root: Path) -> tuple[ReleaseRecord, ...]:
    """Return the releases in tools/releases.toml, oldest first; none if it does not exist.

    Raises:
        ReleaseError: The tag of an entry does not match its package and version.
    """
    file = root / RECORDS
    if not file.exists():
        return ()
    return tuple(
        _parse_record(entry) for entry in tomllib.loads(file.read_text()).get("release", [])
    )


def list_published(root: Path, package: str) -> list[ReleaseRecord]:
    """Return the recorded releases of a package that were not withdrawn, oldest first."""
    return [
        record
        for record in read_records(root)
        if record.package == package and not record.withdrawn
    ]


def write_records(root: Path, records: Sequence[ReleaseRecord]) -> None:
    """Write tools/releases.toml with these releases."""
    lines = [HEADER.rstrip("\n")]
    for record in records:
        lines += ["", "[[release]]"]
        lines += [
            f'{name} = "{getattr(record, name)}"'
            for name in ("package", "version", "tag", "date", "tree", "commit")
        ]
        lines += [
            f"{name} = {json.dumps(reason, ensure_ascii=False)}"
            for name in ("untried", "withdrawn")
            if (reason := getattr(record, name))
        ]
        lines += ["[release.sha256]"] + [
            f'"{name}" = "{digest}"' for name, digest in sorted(record.sha256.items())
        ]
    (root / RECORDS).write_text("\n".join(lines) + "\n")


def last_release(root: Path, package: str) -> ReleaseSource | None:
    """Return the highest version of a package that was released and not withdrawn.

    If the release has both a tag and an entry in tools/releases.toml, the tag is used.

    Raises:
        ReleaseError: The release has no tag, and this clone lacks the recorded content.
    """
    withdrawn = {record.tag for record in read_records(root) if record.withdrawn}
    tags = {
        tag.rpartition("/v")[2]: tag
        for tag in git(root, "tag", "--list", f"{package}/v*").split()
        if tag not in withdrawn
    }
    recorded = {record.version: record for record in list_published(root, package)}
    if not tags and not recorded:
        return None
    version = max(tags.keys() | recorded.keys(), key=Version)
    if version in tags:
        return ReleaseSource(
            package=package,
            version=version,
            treeish=f"{tags[version]}:packages/{package}",
            commit=tags[version],
        )
    record = recorded[version]
    if not has_object(root, record.tree):
        raise ReleaseError(
            f"{RECORDS} records {package} {version} as tree {record.tree[:12]}, which this clone "
            "lacks: fetch the full history (git fetch --unshallow) or the tags (git fetch --tags)."
        )
    return ReleaseSource(
        package=package, version=version, treeish=record.tree, commit=record.commit
    )


def record_commits(root: Path) -> list[ReleaseRecord]:
    """Write the commit id of each release that has none yet, and return these releases.

    Raises:
        ReleaseError: A release is not committed yet, or its commit differs from what was built.
    """
    records = list(read_records(root))
    filled = []
    for number, record in enumerate(records):
        if not record.commit:
            records[number] = replace(record, commit=_find_commit(root, record))
            filled.append(records[number])
    if filled:
        write_records(root, records)
    return filled


def _parse_record(entry: dict[str, Any]) -> ReleaseRecord:
    fields = {name: value for name, value in entry.items() if name != "tag"}
    record = ReleaseRecord(**fields)
    if entry.get("tag") != record.tag:
        raise ReleaseError(
            f"{RECORDS} has the tag {entry.get('tag')!r} for {record.package} {record.version}, "
            f"expected {record.tag!r}: correct the entry."
        )
    return record


def _find_commit(root: Path, record: ReleaseRecord) -> str:
    """Return the commit that added the release's entry to tools/releases.toml."""
    commits = git(
        root, "log", "--format=%H", f'-Stree = "{record.tree}"', "--", RECORDS.as_posix()
    ).split()
    if not commits:
        raise ReleaseError(
            f"{record.tag} is in {RECORDS}, but not committed: commit the release, then record it."
        )
    commit = commits[-1]
    tree = git(root, "rev-parse", f"{commit}:packages/{record.package}").strip()
    if tree != record.tree:
        raise ReleaseError(
            f"commit {commit[:12]} adds {record.tag} with packages/{record.package} as tree "
            f"{tree[:12]}, but the release was built from tree {record.tree[:12]}: files were "
            "changed after tools/release.py ran. Undo that commit and release again."
        )
    return commit


def unpack_tree(root: Path, treeish: str, folder: Path, *, paths: Sequence[str] = ()) -> Path:
    """Unpack a git tree, or these paths of it, into a new folder."""
    done = subprocess.run(
        ["git", "archive", treeish, *paths], cwd=root, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise ReleaseError(f"git archive {treeish} failed: {done.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def has_object(root: Path, name: str) -> bool:
    """Return True if this clone has the git object."""
    return (
        subprocess.run(
            ["git", "cat-file", "-e", name], cwd=root, capture_output=True, check=False
        ).returncode
        == 0
    )


def git(root: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a git command and return its output.

    `environment` contains variables to set in addition to those of this process.

    Raises:
        ReleaseError: The command failed; the message is that of git.
    """
    done = subprocess.run(
        ["git", *arguments],
        cwd=root,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
