"""`python -m tools.golden PACKAGE`: let the last release of a package write its golden files, once.

They go to packages/PACKAGE/tests/golden/VERSION, and are written by the released sources of that package and of its siblings,
not by those of the checkout. An existing folder is left alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.environment import PACKAGES
from tools.releases import ReleaseTrouble, last_release, unpack

ROOT = Path(__file__).resolve().parents[2]

WRITERS = {"engine-fsdp": "engine_fsdp.py", "trainer": "trainer.py"}
"""Programs that take a folder and write into it. The other packages write no files of their own that outlive a run."""


def write(package: str) -> Path:
    """Write the golden files of a package's last release; returns their folder.

    Raises:
        ReleaseTrouble: it was never released, or they exist.
    """
    release = last_release(ROOT, package)
    if release is None:
        raise ReleaseTrouble(f"temper-{package} is not released yet: release it first.")
    target = ROOT / "packages" / package / "tests" / "golden" / release.version
    if target.exists():
        raise ReleaseTrouble(f"{target.relative_to(ROOT)} exists: golden files are written once, by the version that they are named after.")
    with tempfile.TemporaryDirectory(prefix="temper-golden-") as folder:
        released = (last_release(ROOT, each) for each in PACKAGES)
        sources = [unpack(ROOT, each.treeish, Path(folder) / each.package) / "src" for each in released if each is not None]
        command = [sys.executable, str(Path(__file__).parent / WRITERS[package]), str(target)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))})
    return target


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=__doc__)
    parser.add_argument("package", choices=WRITERS)
    try:
        print(write(parser.parse_args().package).relative_to(ROOT))
    except ReleaseTrouble as trouble:
        print(f"golden: {trouble}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
