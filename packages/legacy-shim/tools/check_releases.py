"""Fail if the package index has a verl release whose default configurations are not recorded.

    python packages/legacy-shim/tools/check_releases.py

It asks pip for the versions of verl and compares them with ``configs/data/trees.json``. Add a
missing release with ``build_trees.py``.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).parent.parent / "src/temper_legacy_shim/configs/data/trees.json"
UNSUPPORTED = {
    "v0.1": "before the first release that is supported",
    "v0.2.0.post1": "the same trees as v0.2, one day later",
    "v0.3.0.rc0": "a candidate of v0.3.0.post0",
}
"""Releases without trees of their own, with the reason."""


def main() -> None:
    """Compare the index with the recorded releases."""
    missing = find_missing(versions_of_index())
    if missing:
        sys.exit(
            f"verl {', '.join(missing)}: no default configurations are recorded. Install or check "
            "out the release, and run "
            "packages/legacy-shim/tools/build_trees.py RELEASE PATH."
        )
    print("every verl release of the package index is recorded")


def versions_of_index() -> list[str]:
    """Return every version that pip lists.

    Raises:
        RuntimeError: pip lists none, so nothing can be said.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        "verl",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if listed is None:
        raise RuntimeError(
            f"pip index versions verl named no version: {done.stdout or done.stderr}"
        )
    return [version.strip() for version in listed[1].split(",")]


def find_missing(versions: Iterable[str]) -> list[str]:
    """Return the versions that have no recorded tree, and no reason not to have one."""
    recorded = set(json.loads(DATA.read_text())["versions"]) | UNSUPPORTED.keys()
    return [version for version in versions if f"v{version}" not in recorded]


if __name__ == "__main__":
    main()
