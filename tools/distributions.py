"""A package's sdist and wheel, built twice in two folders and compared: equal sources give equal files."""

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
    """Build two copies of one package, and return the first's sdist and wheel.

    Args:
        first: A copy of the package's folder.
        second: Another one, elsewhere.
        date: YYYY-MM-DD; its midnight in UTC is the time that the files carry.

    Raises:
        ReleaseError: a build failed, or the two differ.
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
    """An sdist, and a wheel out of it, in the folder's dist/."""
    midnight = datetime.fromisoformat(date).replace(tzinfo=UTC)
    _run(
        ["build", "--no-isolation", "--outdir", str(package / "dist"), str(package)],
        variables={"SOURCE_DATE_EPOCH": str(int(midnight.timestamp()))},
    )
    return sorted((package / "dist").iterdir())


def check_files(files: Sequence[Path], *, package: Path) -> None:
    """Hold the built files to `twine check --strict`, and the wheel to what must be inside it.

    Raises:
        ReleaseError: either finds a fault.
    """
    _run(["twine", "check", "--strict", *(str(path) for path in files)])
    for wheel in (path for path in files if path.suffix == ".whl"):
        lost = missing_from_wheel(wheel, package)
        if lost:
            raise ReleaseError(
                f"{wheel.name} lacks {', '.join(sorted(lost))}: see tool.hatch.build in {package.name}/pyproject.toml."
            )


def missing_from_wheel(wheel: Path, package: Path) -> set[str]:
    """What a package's wheel must hold and does not: its licence, its type marker, and every other file of its sources."""
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
    """The files' hashes by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _run(module: Sequence[str], *, variables: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", *module]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | (variables or {})
    )
    if done.returncode != 0:
        raise ReleaseError(f"python -m {' '.join(module)} failed:\n{done.stdout}{done.stderr}")
