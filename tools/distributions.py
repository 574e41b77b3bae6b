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

from tools.releases import ReleaseError


def build_twice(first: Path, second: Path, *, date: str) -> list[Path]:
    """Build two copies of a package, and return sdist and wheel of the first.

    Args:
        first: A copy of the package's folder.
        second: Another copy in a different folder.
        date: YYYY-MM-DD; midnight of this day in UTC is the timestamp of the files.

    Raises:
        ReleaseError: If a build fails or the builds differ.
    """
    built, again = build(first, date=date), build(second, date=date)
    hashes, others = sha256(built), sha256(again)
    if hashes != others:
        differing = sorted(
            name for name in hashes.keys() | others.keys() if hashes.get(name) != others.get(name)
        )
        raise ReleaseError(
            f"two builds of the same sources differ in {', '.join(differing)}: compare the files below {first.parent} and {second.parent}."
        )
    return built


def build(package: Path, *, date: str) -> list[Path]:
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
        lost = missing_from_wheel(wheel, package)
        if lost:
            raise ReleaseError(
                f"{wheel.name} lacks {', '.join(sorted(lost))}: see tool.hatch.build in {package.name}/pyproject.toml."
            )


def missing_from_wheel(wheel: Path, package: Path) -> set[str]:
    """Return the files that a wheel lacks: license, type marker and all other source files."""
    name, version = wheel.name.split("-")[:2]
    sources = package / "src"
    files = (path.relative_to(sources) for path in sources.rglob("*") if path.is_file())
    kept = (
        path.as_posix()
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.parts)
    )
    wanted = {f"{name}/py.typed", f"{name}-{version}.dist-info/licenses/LICENSE", *kept}
    return wanted - set(zipfile.ZipFile(wheel).namelist())


def sha256(files: Sequence[Path]) -> dict[str, str]:
    """Return the files' hashes by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _run(module: Sequence[str], *, variables: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", *module]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | (variables or {})
    )
    if done.returncode != 0:
        raise ReleaseError(f"python -m {' '.join(module)} failed:\n{done.stdout}{done.stderr}")
