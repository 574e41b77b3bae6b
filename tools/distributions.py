"""Build a package's sdist and wheel twice and compare them: equal sources must give equal files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tools.release_records import ReleaseError


def build_twice(first: Path, second: Path, *, date: str) -> list[Path]:
    """Build two copies of a package, and return sdist and wheel of the first.

    Args:
        first: A copy of the package's folder.
        second: Another copy in a different folder.
        date: YYYY-MM-DD; midnight of this day in UTC is the timestamp of the files.

    Raises:
        ReleaseError: If a build fails or the builds differ.
    """
    first_build, second_build = build_package(first, date=date), build_package(second, date=date)
    hashes, others = hash_files(first_build), hash_files(second_build)
    if hashes != others:
        differing = sorted(
            name for name in hashes.keys() | others.keys() if hashes.get(name) != others.get(name)
        )
        raise ReleaseError(
            f"two builds of the same sources differ in {', '.join(differing)}: "
            f"compare the files below {first.parent} and {second.parent}."
        )
    return first_build


def build_package(package: Path, *, date: str) -> list[Path]:
    """Build an sdist and a wheel from it in the folder's dist/."""
    midnight = datetime.fromisoformat(date).replace(tzinfo=UTC)
    _run(
        ["build", "--no-isolation", "--outdir", str(package / "dist"), str(package)],
        # A fixed timestamp makes builds of equal sources identical.
        variables={"SOURCE_DATE_EPOCH": str(int(midnight.timestamp()))},
    )
    return sorted((package / "dist").iterdir())


def check_files(files: Sequence[Path], *, package: Path) -> None:
    """Check the built files with `twine check --strict`, and the wheel for missing files.

    Raises:
        ReleaseError: If a check fails.
    """
    _run(["twine", "check", "--strict", *(str(path) for path in files)])
    for wheel in (path for path in files if path.suffix == ".whl"):
        missing = find_missing_files(wheel, package)
        if missing:
            raise ReleaseError(
                f"{wheel.name} lacks {', '.join(sorted(missing))}: "
                f"see tool.hatch.build in {package.name}/pyproject.toml."
            )


def find_missing_files(wheel: Path, package: Path) -> set[str]:
    """Return the files that a wheel lacks: license, type marker and all other source files."""
    name, version = wheel.name.split("-")[:2]
    sources = package / "src"
    files = (path.relative_to(sources) for path in sources.rglob("*") if path.is_file())
    kept = (
        path.as_posix()
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.parts)
    )
    expected = {f"{name}/py.typed", f"{name}-{version}.dist-info/licenses/LICENSE", *kept}
    return expected - set(zipfile.ZipFile(wheel).namelist())


def hash_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the files' hashes by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _run(module: Sequence[str], *, variables: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", *module]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | (variables or {})
    )
    if result.returncode != 0:
        raise ReleaseError(f"python -m {' '.join(module)} failed:\n{result.stdout}{result.stderr}")
