"""Check a package before its release: changelog fragments, version, promises and siblings."""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

from tools.api import find_broken_promises, find_removed_names
from tools.compat import find_missing_trials
from tools.deprecations import MINORS, check_deprecations
from tools.release_records import ReleaseError, git, last_release, list_published, read_records
from tools.requirements import sibling_requirements

KINDS = ("added", "changed", "fixed", "deprecated", "removed")
_FRAGMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]*\.({'|'.join(KINDS)})\.md")
_VERSION = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")


def check_release(root: Path, package: str, version: str) -> None:
    """Run all checks that need no build.

    Raises:
        ReleaseError: A check found a fault; the message is about the first one.
    """
    folder = root / "packages" / package
    fragments = list_fragments(folder)
    check_version(root, package, version)
    check_removals(root, package, version, fragments)
    check_sibling_bounds(root, package, version)
    broken = find_broken_promises(folder) + check_deprecations(folder, version)
    if broken:
        raise ReleaseError("\n".join(broken))
    check_deprecation_period(root, package, version)


def check_trials(root: Path, package: str, version: str, *, reason: str) -> None:
    """Check that `nox -s compat` passed with these contents, or that a reason is given.

    Raises:
        ReleaseError: A trial is missing and no reason is given, or a reason is given without need.
    """
    missing = find_missing_trials(root, package, version)
    if missing and not reason.strip():
        raise ReleaseError(
            f"temper-{package} {version} was not tried with its siblings in its present state:\n"
            + "\n".join(f"  {sentence}" for sentence in missing)
            + "\nOr give --untried REASON, which is recorded in tools/releases.toml."
        )
    if reason and not missing:
        raise ReleaseError(
            f"every pair of temper-{package} was tried with these contents: remove --untried."
        )


def list_fragments(package: Path) -> list[Path]:
    """Return the package's changelog fragments.

    Raises:
        ReleaseError: There is none, one is empty, or a file name in changes/ is not recognized.
    """
    fragments = sorted(
        path for path in (package / "changes").glob("*") if not path.name.startswith(".")
    )
    misnamed = [path.name for path in fragments if not _FRAGMENT.fullmatch(path.name)]
    if misnamed:
        raise ReleaseError(
            f"{package.name}/changes contains {', '.join(misnamed)}: name a fragment "
            f"<slug>.<kind>.md, where kind is one of {', '.join(KINDS)}."
        )
    if not fragments:
        raise ReleaseError(f"{package.name}/changes is empty: there is nothing to release.")
    empty = [path.name for path in fragments if not path.read_text().strip()]
    if empty:
        raise ReleaseError(
            f"{package.name}/changes/{empty[0]} is empty: write a sentence for users, or delete it."
        )
    return fragments


def check_version(root: Path, package: str, version: str) -> None:
    """Check that a version is X.Y.Z, new, above all releases, and not below the declared one."""
    folder = root / "packages" / package
    if not _VERSION.fullmatch(version):
        raise ReleaseError(
            f"{version!r} is not a release version: write three numbers, as in 0.2.0."
        )
    # Withdrawn versions count too: two different contents never carry the same version.
    used = [record.version for record in read_records(root) if record.package == package]
    if last := last_release(root, package):
        used.append(last.version)
    highest = max(used, key=Version, default=None)
    if highest is not None and Version(version) <= Version(highest):
        raise ReleaseError(
            f"temper-{package} {highest} is already released: {version} is not above it."
        )
    declared = read_declared_version(folder)
    if Version(version) < Version(declared):
        raise ReleaseError(f"{package}/pyproject.toml declares {declared}: {version} is below it.")
    if re.search(
        rf"^## {re.escape(version)}\s", (folder / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        raise ReleaseError(
            f"{package}/CHANGELOG.md already has an entry for {version}: choose a higher version."
        )


def check_removals(root: Path, package: str, version: str, fragments: list[Path]) -> None:
    """Check that a release with removals raises the minor version."""
    last = last_release(root, package)
    removals = [path.name for path in fragments if path.name.endswith(".removed.md")]
    if (
        last is not None
        and removals
        and Version(version).release[:2] == Version(last.version).release[:2]
    ):
        raise ReleaseError(
            f"{', '.join(removals)} announces a removal, and {version} has the minor version of "
            f"{last.version}: raise the minor version, or restore what was removed."
        )


def check_deprecation_period(root: Path, package: str, version: str) -> None:
    """Check that removed names were deprecated in at least two released minor versions."""
    released = [Version(record.version) for record in list_published(root, package)]
    for name, deprecations in find_removed_names(root / "packages" / package).items():
        latest = max(deprecations, key=lambda deprecation: Version(deprecation.removed_in))
        minors = {each.release[:2] for each in released if each >= Version(latest.since)}
        if Version(version) < Version(latest.removed_in) or len(minors) < MINORS:
            raise ReleaseError(
                f"{name} was removed. It was deprecated in {latest.since} and promised until "
                f"{latest.removed_in}; {len(minors)} minor versions were released with the "
                f"warning, and {MINORS} must be. Restore it until then."
            )


def check_sibling_bounds(root: Path, package: str, version: str) -> None:
    """Check that the bounds between the package and its siblings accept the versions of both."""
    declared = {folder.name: read_declared_version(folder) for folder in _list_packages(root)} | {
        package: version
    }
    for folder in _list_packages(root):
        for requirement in sibling_requirements(folder):
            sibling = requirement.name.removeprefix("temper-")
            is_affected = package in (folder.name, sibling)
            # A sibling between two releases declares X.Y.Z.dev0, which bounds without a
            # pre-release would leave out by default.
            if is_affected and not requirement.specifier.contains(
                declared[sibling], prereleases=True
            ):
                raise ReleaseError(
                    f"temper-{folder.name} requires {requirement}, which excludes {sibling} "
                    f"{declared[sibling]}: first change that bound in "
                    f"{folder.name}/pyproject.toml, with a changelog fragment."
                )


def find_reused_versions(root: Path) -> list[str]:
    """Report packages whose files differ from a release while they carry its version.

    pip would take such a package for the release. Withdrawn releases count too.
    """
    recorded = {(record.package, record.version): record.tree for record in read_records(root)}
    faults = []
    for folder in _list_packages(root):
        version = read_declared_version(folder)
        tree = recorded.get((folder.name, version))
        if tree is not None and tree != _hash_working_tree(root, folder.name):
            faults.append(
                f"{folder.name}/pyproject.toml declares {version}, but the package differs from "
                f"release {version}: set the version to {next_version(version)} "
                "(tools/release.py --record does)."
            )
    return faults


def next_version(version: str) -> str:
    """Return the version that a package carries after a release: 0.2.0 gives 0.2.1.dev0."""
    major, minor, patch = Version(version).release
    return f"{major}.{minor}.{patch + 1}.dev0"


def set_version(package: Path, version: str) -> None:
    """Write a version into the package's pyproject.toml."""
    file = package / "pyproject.toml"
    old = f'version = "{read_declared_version(package)}"'
    file.write_text(file.read_text().replace(f"\n{old}\n", f'\nversion = "{version}"\n', 1))
    assert read_declared_version(package) == version


def _hash_working_tree(root: Path, package: str) -> str:
    """Return git's tree id of a package's folder as its files are now, committed or not."""
    with tempfile.TemporaryDirectory(prefix="temper-index-") as folder:
        # A separate index, so that the check does not stage anything in the checkout.
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git(root, "add", "--all", f"packages/{package}", environment=index)
        return git(root, "write-tree", f"--prefix=packages/{package}/", environment=index).strip()


def read_declared_version(package: Path) -> str:
    """Return the version in the package's pyproject.toml."""
    version: str = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    return version


def _list_packages(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
