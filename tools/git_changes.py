"""Find which files of the working tree differ from a commit. Needs git and the standard library."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


class ChangesError(RuntimeError):
    """Raised if the changes cannot be found; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Files that differ from a commit; paths are relative to the repository, with slashes."""

    base: str
    """Id of the commit."""
    present: tuple[str, ...]
    """Files that are new or differ."""
    deleted: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return self.present + self.deleted


def find_changes(root: Path, *, base: str | None = None) -> Changes:
    """Return what differs from the merge base with main, or from `base`.

    Raises:
        ChangesError: If `root` is no git checkout, or the commit does not exist.
    """
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        raise ChangesError(
            "--changed needs git, which is not installed: install it, or run dev.py test without "
            "--changed."
        ) from None
    except subprocess.CalledProcessError:
        top = ""
    if not top or Path(top.strip()).resolve() != root.resolve():
        raise ChangesError(
            f"{root} is not a git checkout, so --changed cannot find what has changed: run dev.py "
            "test without --changed, or in a clone."
        )
    commit = _find_commit(root, base) if base is not None else _find_merge_base(root)
    # Without renames, so that the old and the new path both count.
    fields = _git(root, "diff", "--name-status", "--no-renames", "-z", commit).split("\0")[:-1]
    changed = dict(zip(fields[1::2], fields[::2], strict=True))
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]
    paths = {*changed, *untracked}
    present = {path for path in paths if (root / path).is_file()}
    return Changes(
        base=commit, present=tuple(sorted(present)), deleted=tuple(sorted(paths - present))
    )


def list_files(root: Path, pattern: str) -> list[str]:
    """Return the files of a working tree that match a pattern of git and are not ignored."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", pattern)
    return sorted({path for path in listed.split("\0")[:-1] if (root / path).is_file()})


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout


def _find_commit(root: Path, name: str) -> str:
    try:
        commit = _git(
            root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
    except subprocess.CalledProcessError:
        raise ChangesError(
            f"there is no commit {name!r}: give --base a branch, a tag or a commit id."
        ) from None
    return commit.strip()


def _find_merge_base(root: Path) -> str:
    """Return the merge base with main, which on main is the last commit."""
    for branch in ("main", "origin/main"):
        try:
            return _git(root, "merge-base", "HEAD", branch).strip()
        except subprocess.CalledProcessError:
            continue
    raise ChangesError(
        "there is no merge base with main or origin/main: name the commit to compare with, for "
        "example --base HEAD."
    )
