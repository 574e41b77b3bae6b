"""What one rank wrote into its part of a checkpoint: files with sizes and checksums, computed by the rank that wrote them."""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.errors import DamagedCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file."""

    path: str
    """Relative, with forward slashes: to its part in a PartReport, to the step directory in a manifest."""
    num_bytes: int
    """Size."""
    sha256: str
    """Of its content, in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What one rank of one participant wrote."""

    files: tuple[FileRecord, ...]
    """Paths relative to the part's directory; empty for a rank that wrote nothing."""


def report_part(directory: str | Path, files: Iterable[str]) -> PartReport:
    """Sizes and checksums of files that this rank just wrote; they are on the disk, not only in its cache, when this returns.

    Args:
        directory: of the part.
        files: paths relative to it.
    """
    return PartReport(files=tuple(_record(Path(directory), path) for path in sorted(set(files))))


def _record(directory: Path, path: str) -> FileRecord:
    with open(directory / path, "rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileRecord(
            path=Path(path).as_posix(), num_bytes=os.fstat(file.fileno()).st_size, sha256=digest
        )


def find_file_damage(directory: Path, record: FileRecord, *, with_content: bool) -> str | None:
    """Return what is wrong with a file, worded to follow its name, or None if it is as recorded.

    Args:
        directory: that the record's path is relative to.
        record: what was written.
        with_content: also read the file and compare checksums.

    Raises:
        OSError: If the file cannot be read, for example for lack of permission. That is no damage.
    """
    # Not Path.is_file(): from Python 3.14 on it returns False for every OSError, so that a file
    # system which is briefly away would look like a deleted file.
    try:
        status = (directory / record.path).stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != record.num_bytes:
            return f"has {status.st_size} bytes instead of {record.num_bytes}"
        if with_content:
            with open(directory / record.path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    return "has another checksum than when it was written"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    return None


def write_json(directory: str | Path, name: str, content: Mapping[str, object]) -> str:
    """Write a small mapping of JSON values beside a part's tensors.

    Returns:
        The name, for ``report_part``.
    """
    (Path(directory) / name).write_text(json.dumps(dict(content), indent=2, sort_keys=True) + "\n")
    return name


def read_json(directory: str | Path, name: str) -> dict[str, object]:
    """Read what ``write_json`` wrote.

    Raises:
        DamagedCheckpointError: the file is missing or is not such a mapping.
    """
    path = Path(directory) / name
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing: load a step that is whole.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(
            f"{path} is not JSON ({error}): load a step that is whole."
        ) from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"{path} should hold a JSON object, but holds {str(content)[:80]}: load a step that is whole."
        )
    return content
