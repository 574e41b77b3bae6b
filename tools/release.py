"""Release one package, except for the commit and the tag, whose commands it prints.

`python tools/release.py engine-api 0.2.0` sets the version, adds the changelog fragments to the
changelog, locks the public names, builds sdist and wheel twice, and records the release in
tools/releases.toml. It works on a copy first and changes the checkout only if everything succeeds.

Run `nox -s compat` before: it tries the package and each of its siblings with the other's last
release. A release without this record is refused unless `--untried REASON` is given; the reason is
stored in tools/releases.toml.

    --draft    run the same checks and builds, but do not change the checkout
    --record   after the release commit, without PACKAGE and VERSION: write the commits of released
               packages into tools/releases.toml, and the next version, X.Y.Z.dev0, into their
               pyproject.toml
    --verify   build a recorded release again from its recorded content and compare the hashes;
               with `--out FOLDER`, keep the files, as for publishing them
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.api import LOCK, write_lock
from tools.compat import find_missing_trials
from tools.distributions import build_package, build_twice, check_files, hash_files
from tools.release_checks import (
    check_release,
    check_trials,
    next_version,
    read_declared_version,
    set_version,
)
from tools.release_records import (
    RECORDS,
    ReleaseError,
    ReleaseRecord,
    git,
    has_object,
    read_records,
    record_commits,
    unpack_tree,
    write_records,
)

ROOT = Path(__file__).resolve().parent.parent

CHANGED_FILES = ("pyproject.toml", "CHANGELOG.md", LOCK)
"""Files of the package's folder that a release changes, in addition to the fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A release that was built in a copy."""

    package: Path
    """Copy of the package's folder with the version set, the changelog updated and no fragments."""
    date: str
    files: tuple[Path, ...]
    """The sdist and the wheel."""


def build_draft(root: Path, package: str, version: str, *, folder: Path) -> Draft:
    """Build the release in `folder` from the checkout's files that git knows or would add.

    Raises:
        ReleaseError: If a check, towncrier, a build or `twine check` fails.
    """
    check_release(root, package, version)
    copies = [_copy_package(root, package, folder / name) for name in ("one", "two")]
    # Two separate copies are built, so that a build that is not reproducible is noticed.
    set_version(copies[0], version)
    _apply_fragments(copies[0], version)
    write_lock(copies[0])
    for name in CHANGED_FILES:
        shutil.copy(copies[0] / name, copies[1] / name)
    dates = re.findall(
        rf"(?m)^## {re.escape(version)} \((\d{{4}}-\d{{2}}-\d{{2}})\)$",
        (copies[0] / "CHANGELOG.md").read_text(),
    )
    if len(dates) != 1:
        raise ReleaseError(
            f"CHANGELOG.md has {len(dates)} dated headings of {version}, expected one: "
            "see towncrier's settings."
        )
    files = build_twice(copies[0], copies[1], date=dates[0])
    check_files(files, package=copies[0])
    return Draft(package=copies[0], date=dates[0], files=tuple(files))


def make_release(root: Path, package: str, version: str, *, reason: str = "") -> ReleaseRecord:
    """Build the release and stage it in the checkout: package, records and dist/; commit nothing.

    `reason` tells why an untried pair may be released; it is empty if all pairs were tried.

    Raises:
        ReleaseError: If `build_draft` fails, the checkout has changes, a pair was not tried and no
            reason is given, or dist/ contains another build of this version.
    """
    unsaved = git(root, "status", "--porcelain").strip()
    if unsaved:
        raise ReleaseError(
            "the checkout has changes, which would become part of the release: "
            f"commit or stash them first.\n{unsaved}"
        )
    # Check the version first, so that a wrong one is reported before hours of trials.
    check_release(root, package, version)
    check_trials(root, package, version, reason=reason)
    with tempfile.TemporaryDirectory(prefix="temper-release-") as folder:
        draft = build_draft(root, package, version, folder=Path(folder))
        _copy_to_dist(root, draft.files)
        target = root / "packages" / package
        for name in CHANGED_FILES:
            shutil.copy(draft.package / name, target / name)
        for fragment in target.glob("changes/*.md"):
            fragment.unlink()
        git(root, "add", "--all", f"packages/{package}")
        tree = git(root, "write-tree", f"--prefix=packages/{package}/").strip()
        record = ReleaseRecord(
            package=package,
            version=version,
            date=draft.date,
            tree=tree,
            sha256=hash_files(draft.files),
            untried=reason,
        )
    write_records(root, [*read_records(root), record])
    git(root, "add", RECORDS.as_posix())
    return record


def begin_next_versions(root: Path) -> list[str]:
    """Set the next version, `X.Y.Z.dev0`, in every package that has a released version.

    Returns:
        One line for each changed package.
    """
    recorded = {(record.package, record.version) for record in read_records(root)}
    changed = []
    for folder in sorted(path.parent for path in root.glob("packages/*/pyproject.toml")):
        version = read_declared_version(folder)
        if (folder.name, version) in recorded:
            set_version(folder, next_version(version))
            changed.append(f"{folder.name} is now {next_version(version)}")
    return changed


def verify_release(root: Path, package: str, version: str, *, out: Path | None = None) -> None:
    """Build a recorded release again from its recorded content and compare the hashes.

    Args:
        root: The repository.
        package: Folder name of the package.
        version: The released version.
        out: Folder for the files if their hashes are equal; by default they are not kept.

    Raises:
        ReleaseError: If there is no such record, this clone lacks the content, or a hash differs.
    """
    matching = [
        record
        for record in read_records(root)
        if (record.package, record.version) == (package, version)
    ]
    if not matching or not has_object(root, matching[0].tree):
        raise ReleaseError(
            f"{RECORDS} has no release {package} {version} whose content this clone has: "
            "fetch the full history, or name another version."
        )
    with tempfile.TemporaryDirectory(prefix="temper-release-") as folder:
        copy = unpack_tree(root, matching[0].tree, Path(folder) / package)
        files = build_package(copy, date=matching[0].date)
        hashes = hash_files(files)
        differing = sorted(
            name for name, digest in hashes.items() if matching[0].sha256.get(name) != digest
        )
        if differing:
            raise ReleaseError(
                f"{', '.join(differing)} has another hash than recorded: "
                "build with the tools of constraints/cpu.txt."
            )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, out)


def _copy_package(root: Path, package: str, folder: Path) -> Path:
    """Copy the package's files that git knows or would add to a folder with the same layout."""
    names = git(
        root,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        f"packages/{package}",
        "tools/changelog.md.jinja",
    )
    for name in (name for name in names.split("\0") if name and (root / name).exists()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    return folder / "packages" / package


def _apply_fragments(package: Path, version: str) -> None:
    """Move the fragments into the changelog with towncrier."""
    command = [
        sys.executable,
        "-m",
        "towncrier",
        "build",
        "--yes",
        "--dir",
        str(package),
        "--version",
        version,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    left = [path.name for path in (package / "changes").glob("*.md")]
    if done.returncode != 0 or left:
        raise ReleaseError(
            f"towncrier exited with status {done.returncode} and left {left}:\n"
            f"{done.stdout}{done.stderr}"
        )


def _copy_to_dist(root: Path, files: Sequence[Path]) -> None:
    folder = root / "dist"
    folder.mkdir(exist_ok=True)
    for path in files:
        target = folder / path.name
        if target.exists() and target.read_bytes() != path.read_bytes():
            raise ReleaseError(
                f"dist/{path.name} exists and is a different build: move it away and release again."
            )
        shutil.copy(path, target)


def _get_changelog_entry(changelog: str, version: str) -> str:
    """Return the changelog's entry of one version."""
    _, mark, rest = changelog.partition(f"## {version} ")
    return (mark + rest.partition("\n## ")[0]).strip()


def _describe_next_steps(record: ReleaseRecord) -> str:
    name = f"temper-{record.package} {record.version}"
    return "\n".join(
        [
            *(f"{digest}  dist/{file}" for file, digest in sorted(record.sha256.items())),
            f"{name} is staged. Next:",
            f'  git commit -m "{record.package}: release {record.version}"',
            f'  git tag -a {record.tag} -m "{name}"        # on the commit in main',
            "  python tools/release.py --record           # then: record it, start the next",
        ]
    )


def _build_parser(root: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="tools/release.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "package",
        nargs="?",
        choices=sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml")),
    )
    parser.add_argument("version", nargs="?", help="X.Y.Z")
    parser.add_argument(
        "--untried",
        metavar="REASON",
        default="",
        help="release although a pair was not tried, and record the reason",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--draft",
        action="store_true",
        help="run the checks and builds, but do not change the checkout",
    )
    action.add_argument(
        "--record",
        action="store_true",
        help="record the commits of released packages, and set their next versions",
    )
    action.add_argument(
        "--verify", action="store_true", help="build a recorded release again and compare"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="with --verify: copy the verified files there"
    )
    return parser


def _print_draft(root: Path, package: str, version: str) -> None:
    """Print the changelog entry and checksums of a release, and what it still needs."""
    with tempfile.TemporaryDirectory(prefix="temper-release-") as folder:
        draft = build_draft(root, package, version, folder=Path(folder))
        print(_get_changelog_entry((draft.package / "CHANGELOG.md").read_text(), version))
        print(
            "\n".join(
                f"{digest}  {name}" for name, digest in sorted(hash_files(draft.files).items())
            )
        )
    for sentence in find_missing_trials(root, package, version):
        print(f"required before the release: {sentence}")


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line and return the exit status."""
    parser = _build_parser(root)
    chosen = parser.parse_args(arguments)
    if chosen.out and not chosen.verify:
        parser.error("--out keeps the files of --verify: give both")
    if not (chosen.package is None) == (chosen.version is None) == chosen.record:
        parser.error("give PACKAGE and VERSION, or only --record")
    if chosen.untried and (chosen.record or chosen.verify or chosen.draft):
        parser.error(
            "--untried REASON is only for a release: --draft, --record and --verify need no trials"
        )
    try:
        if chosen.record:
            for record in record_commits(root):
                print(f"{record.tag} is commit {record.commit}")
            print("\n".join(begin_next_versions(root)))
        elif chosen.verify:
            verify_release(root, chosen.package, chosen.version, out=chosen.out)
            print(
                f"temper-{chosen.package} {chosen.version}: the new build equals the recorded one"
            )
        elif chosen.draft:
            _print_draft(root, chosen.package, chosen.version)
        else:
            print(
                _describe_next_steps(
                    make_release(root, chosen.package, chosen.version, reason=chosen.untried)
                )
            )
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
