"""Bind one package's changelog fragments into its CHANGELOG.md, and say which tag to make.

`python tools/release.py engine-api --draft` shows what the entry would be and changes nothing; without `--draft` it is
written, the fragments are removed, and the tag's name is printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

KINDS = ("added", "changed", "fixed", "deprecated", "removed")
_FRAGMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]*\.({'|'.join(KINDS)})\.md")


class ReleaseTrouble(RuntimeError):
    """The package cannot be released as it stands; the message says what to do."""


def fragments(package: Path) -> list[Path]:
    """The package's fragments.

    Raises:
        ReleaseTrouble: there is none, or a file in changes/ is named so that it would be passed over in silence.
    """
    found = sorted(path for path in (package / "changes").iterdir() if not path.name.startswith("."))
    misnamed = [path.name for path in found if not _FRAGMENT.fullmatch(path.name)]
    if misnamed:
        raise ReleaseTrouble(
            f"{package.name}/changes holds {', '.join(misnamed)}: name a fragment <slug>.<kind>.md, "
            f"where kind is one of {', '.join(KINDS)}."
        )
    if not found:
        raise ReleaseTrouble(f"{package.name}/changes is empty: there is nothing to release since the last version.")
    return found


def version_of(package: Path) -> str:
    """The version that the package's pyproject.toml declares.

    Raises:
        ReleaseTrouble: the changelog has an entry for it already.
    """
    version: str = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    if re.search(rf"^## {re.escape(version)}\b", (package / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise ReleaseTrouble(
            f"{package.name}/CHANGELOG.md has an entry for {version} already: raise `version` in {package.name}/pyproject.toml first."
        )
    return version


def release(package: Path, *, is_draft: bool) -> str:
    """Bind the fragments (or only print the entry) and return the name of the tag to make."""
    fragments(package)
    version = version_of(package)
    arguments = ["--draft"] if is_draft else ["--yes"]
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--dir", str(package), "--version", version, *arguments],
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseTrouble(f"towncrier failed with exit status {done.returncode}: its message is above.")
    return f"{package.name}/v{version}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    packages = Path(__file__).resolve().parent.parent / "packages"
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/release.py")
    parser.add_argument("package", choices=sorted(path.parent.name for path in packages.glob("*/pyproject.toml")))
    parser.add_argument("--draft", action="store_true", help="show the entry and change nothing")
    chosen = parser.parse_args(arguments)
    try:
        tag = release(packages / chosen.package, is_draft=chosen.draft)
    except ReleaseTrouble as trouble:
        print(f"release: {trouble}", file=sys.stderr)
        return 1
    print(tag if chosen.draft else f"commit this, then: git tag {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
