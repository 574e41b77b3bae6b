"""Check a package before its release: changelog fragments, version, promises and siblings."""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

from tools.api import complaints, removed_names
from tools.bounds import sibling_requirements
from tools.compat import find_missing_trials
from tools.deprecations import MINORS, faults
from tools.releases import ReleaseError, git, last_release, published, read_records

KINDS = ("added", "changed", "fixed", "deprecated", "removed")
_FRAGMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]*\.({'|'.join(KINDS)})\.md")
_VERSION = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")


def check_before(root: Path, package: str, version: str) -> None:
    """Run all checks that need no build.

    Raises:
        ReleaseError: A check found a fault; the message is about the first one.
    """
    folder = root / "packages" / package
    found = fragments(folder)
    check_version(root, package, version)
    check_removals(root, package, version, found)
    check_siblings(root, package, version)
    broken = complaints(folder) + faults(folder, version)
    if broken:
        raise ReleaseError("\n".join(broken))
    check_notice(root, package, version)


def check_tried(root: Path, package: str, version: str, *, reason: str) -> None:
    """Check that `nox -s compat` passed with these contents, or that a reason is given.

    Raises:
        ReleaseError: A trial is missing and no reason is given, or a reason is given without need.
    """
    missing = find_missing_trials(root, package, version)
    if missing and not reason.strip():
        raise ReleaseError(
            f"temper-{package} {version} was not tried with its siblings as it stands:\n"
            + "\n".join(f"  {sentence}" for sentence in missing)
            + "\nOr give --untried REASON, which tools/releases.toml keeps."
        )
    if reason and not missing:
        raise ReleaseError(
            f"every pair of temper-{package} was tried with these contents: leave --untried away."
        )


def fragments(package: Path) -> list[Path]:
    """Return the package's changelog fragments.

    Raises:
        ReleaseError: There is none, one is empty, or a file name in changes/ is not recognized.
    """
    found = sorted(
        path for path in (package / "changes").glob("*") if not path.name.startswith(".")
    )
    misnamed = [path.name for path in found if not _FRAGMENT.fullmatch(path.name)]
    if misnamed:
        raise ReleaseError(
            f"{package.name}/changes holds {', '.join(misnamed)}: name a fragment <slug>.<kind>.md, "
            f"where kind is one of {', '.join(KINDS)}."
        )
    if not found:
        raise ReleaseError(
            f"{package.name}/changes is empty: there is nothing to release since the last version."
        )
    empty = [path.name for path in found if not path.read_text().strip()]
    if empty:
        raise ReleaseError(
            f"{package.name}/changes/{empty[0]} is empty: write one sentence to the user, or remove it."
        )
    return found


def check_version(root: Path, package: str, version: str) -> None:
    """Check that a version is X.Y.Z, new, above all releases, and not below the declared one."""
    folder = root / "packages" / package
    if not _VERSION.fullmatch(version):
        raise ReleaseError(
            f"{version!r} is no version that we release: write three numbers, as in 0.2.0."
        )
    # Withdrawn versions count too: two different contents never carry the same version.
    used = [record.version for record in read_records(root) if record.package == package]
    if last := last_release(root, package):
        used.append(last.version)
    highest = max(used, key=Version, default=None)
    if highest is not None and Version(version) <= Version(highest):
        raise ReleaseError(
            f"temper-{package} {highest} is released already: {version} is not above it."
        )
    declared = declared_version(folder)
    if Version(version) < Version(declared):
        raise ReleaseError(f"{package}/pyproject.toml declares {declared}: {version} is below it.")
    if re.search(
        rf"^## {re.escape(version)}\s", (folder / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        raise ReleaseError(
            f"{package}/CHANGELOG.md has an entry for {version} already: choose a higher version."
        )


def check_removals(root: Path, package: str, version: str, found: list[Path]) -> None:
    """Check that a release with removals raises the minor version."""
    last = last_release(root, package)
    removals = [path.name for path in found if path.name.endswith(".removed.md")]
    if (
        last is not None
        and removals
        and Version(version).release[:2] == Version(last.version).release[:2]
    ):
        raise ReleaseError(
            f"{', '.join(removals)} removes something since {last.version}, so {version} would break users within a minor version: "
            "raise the minor version, or bring it back."
        )


def check_notice(root: Path, package: str, version: str) -> None:
    """Check that removed names were deprecated in at least two released minor versions."""
    released = [Version(record.version) for record in published(root, package)]
    for name, promises in removed_names(root / "packages" / package).items():
        latest = max(promises, key=lambda promise: Version(promise.removed_in))
        minors = {each.release[:2] for each in released if each >= Version(latest.since)}
        if Version(version) < Version(latest.removed_in) or len(minors) < MINORS:
            raise ReleaseError(
                f"{name} is removed_names, which was deprecated in {latest.since} and promised until {latest.removed_in}; minor versions released "
                f"with the warning: {len(minors)}, and {MINORS} must be. Bring it back until then."
            )


def check_siblings(root: Path, package: str, version: str) -> None:
    """Check that the bounds between the package and its siblings accept the versions of both."""
    declared = {folder.name: declared_version(folder) for folder in _packages(root)} | {
        package: version
    }
    for folder in _packages(root):
        for requirement in sibling_requirements(folder):
            sibling = requirement.name.removeprefix("temper-")
            asked = package in (folder.name, sibling)
            # A sibling between two releases declares X.Y.Z.dev0, which bounds without a
            # pre-release would leave out by default.
            if asked and not requirement.specifier.contains(declared[sibling], prereleases=True):
                raise ReleaseError(
                    f"temper-{folder.name} requires {requirement}, which leaves out {sibling} {declared[sibling]}: "
                    f"raise that bound in {folder.name}/pyproject.toml, with a changelog fragment, first."
                )


def reused_versions(root: Path) -> list[str]:
    """Report packages whose files differ from a release while they carry its version.

    pip would take such a package for the release. Withdrawn releases count too.
    """
    recorded = {(record.package, record.version): record.tree for record in read_records(root)}
    complaints = []
    for folder in _packages(root):
        version = declared_version(folder)
        tree = recorded.get((folder.name, version))
        if tree is not None and tree != _tree_of_files(root, folder.name):
            complaints.append(
                f"{folder.name}/pyproject.toml declares {version}, but the package differs from "
                f"release {version}: set the version to {next_version(version)} "
                "(tools/release.py --record does)."
            )
    return complaints


def next_version(version: str) -> str:
    """Return the version that a package carries after a release: 0.2.0 gives 0.2.1.dev0."""
    major, minor, patch = Version(version).release
    return f"{major}.{minor}.{patch + 1}.dev0"


def set_version(package: Path, version: str) -> None:
    """Write a version into the package's pyproject.toml."""
    file = package / "pyproject.toml"
    old = f'version = "{declared_version(package)}"'
    file.write_text(file.read_text().replace(f"\n{old}\n", f'\nversion = "{version}"\n', 1))
    assert declared_version(package) == version


def _tree_of_files(root: Path, package: str) -> str:
    """Return git's tree id of a package's folder as its files are now, committed or not."""
    with tempfile.TemporaryDirectory(prefix="temper-index-") as folder:
        # An index of its own, so that the check does not stage anything in the checkout.
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git(root, "add", "--all", f"packages/{package}", environment=index)
        return git(root, "write-tree", f"--prefix=packages/{package}/", environment=index).strip()


def declared_version(package: Path) -> str:
    """Return the version in the package's pyproject.toml."""
    version: str = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    return version


def _packages(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
