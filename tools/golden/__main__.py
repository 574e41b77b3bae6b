"""Write golden files with the last release of a package: `python -m tools.golden PACKAGE`.

The files go to packages/PACKAGE/tests/golden/VERSION, and a run of the trainer to
golden_runs/VERSION next to it. They are written by the released sources of the package and of its
siblings, not by those of the checkout. Existing files are not changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.environment import PACKAGES
from tools.release_records import ReleaseError, last_release, unpack_tree

ROOT = Path(__file__).resolve().parents[2]

WRITERS: dict[str, dict[str, tuple[str, ...]]] = {
    "engine-fsdp": {"golden": ("engine.py", "temper_engine_fsdp.engine:FSDPEngine")},
    "engine-megatron": {"golden": ("engine.py", "temper_engine_megatron.engine:MegatronEngine")},
    "trainer": {"golden": ("trainer.py",), "golden_runs": ("trainer_run.py",)},
    "legacy-shim": {"golden": ("translations.py",)},
}
"""The program and its further arguments, by package and by folder below the package's tests.

The contract's files are in the engines' checkpoints, and so are those that the shim converts.
"""


def write_golden_files(package: str) -> list[Path]:
    """Write the missing golden files of a package's last release, and return their folders.

    Raises:
        ReleaseError: If the package was never released, or no file is missing.
    """
    release = last_release(ROOT, package)
    if release is None:
        raise ReleaseError(f"temper-{package} is not released yet: release it first.")
    folders = {
        ROOT / "packages" / package / "tests" / name / release.version: each
        for name, each in WRITERS[package].items()
    }
    missing = {folder: command for folder, command in folders.items() if not folder.exists()}
    if not missing:
        shown = " and ".join(str(folder.relative_to(ROOT)) for folder in folders)
        raise ReleaseError(
            f"{shown} exists: golden files are written only once, by the version that they are "
            "named after."
        )
    with tempfile.TemporaryDirectory(prefix="temper-golden-") as scratch:
        released = (last_release(ROOT, each) for each in PACKAGES)
        sources = [
            unpack_tree(ROOT, each.treeish, Path(scratch) / each.package) / "src"
            for each in released
            if each is not None
        ]
        for folder, (program, *arguments) in missing.items():
            command = [
                sys.executable,
                str(Path(__file__).parent / program),
                str(folder),
                *arguments,
            ]
            subprocess.run(
                command,
                check=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))},
            )
    return list(missing)


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=__doc__)
    parser.add_argument("package", choices=WRITERS)
    try:
        for folder in write_golden_files(parser.parse_args().package):
            print(folder.relative_to(ROOT))
    except ReleaseError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
