"""One participant's checkpoint files, with sizes and checksums from the writing rank."""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.checksums import compute_file_checksum, has_checksum
from temper_engine_api.distributed.gatherable import gatherable
from temper_engine_api.errors import DamagedCheckpointError


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's path, size and checksum."""

    path: str
    """Path with forward slashes. In a PartReport it is relative to the directory of the part, and
    in a manifest to the step directory."""
    num_bytes: int
    checksum: str
    """Algorithm, a colon, and the hexadecimal digest of the content."""


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """Files that one rank wrote for one part of a checkpoint.

    Example:
        >>> record = FileRecord(path="dcp/__0_0.distcp", num_bytes=3, checksum="blake3:6437b3ac")
        >>> sum(file.num_bytes for file in PartReport(files=(record,)).files)
        3
    """

    files: tuple[FileRecord, ...]
    """Paths relative to the part's directory; empty for a rank that wrote nothing."""


def report_part(directory: str | Path, files: Iterable[str]) -> PartReport:
    """Compute sizes and checksums of files that this rank wrote, and fsync the files.

    Args:
        directory: Directory of the part.
        files: Paths relative to it.
    """
    return PartReport(files=tuple(_record(Path(directory), path) for path in sorted(set(files))))


def _record(directory: Path, path: str) -> FileRecord:
    with open(directory / path, "rb+") as file:
        os.fsync(file.fileno())
        return FileRecord(
            path=Path(path).as_posix(),
            num_bytes=os.fstat(file.fileno()).st_size,
            checksum=compute_file_checksum(directory / path),
        )


def find_file_damage(directory: Path, record: FileRecord, *, with_content: bool) -> str | None:
    """Return what is wrong with a file, such as "is missing", or None if it is as recorded.

    Args:
        directory: Directory that the record's path is relative to.
        record: Size and checksum when the file was written.
        with_content: Also read the file and compare checksums.

    Raises:
        OSError: If the file cannot be read, for example for lack of permission.
    """
    # Path.is_file() is not used, because from Python 3.14 on it returns False for every OSError. A
    # file system that is briefly unavailable would then look like a deleted file.
    try:
        status = (directory / record.path).stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != record.num_bytes:
            return f"has {status.st_size} bytes instead of {record.num_bytes}"
        if with_content and not has_checksum(directory / record.path, record.checksum):
            return "has another checksum than when it was written"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except ValueError:  # a path with a null byte, or one that cannot be encoded
        return "has an impossible name"
    return None


def write_json(directory: str | Path, name: str, content: Mapping[str, object]) -> str:
    """Write a mapping of JSON values; return the name, for `report_part`."""
    (Path(directory) / name).write_text(json.dumps(dict(content), indent=2, sort_keys=True) + "\n")
    return name


def read_json(directory: str | Path, name: str) -> dict[str, object]:
    """Read a file of `write_json`.

    Raises:
        DamagedCheckpointError: If the file is missing or is not a JSON object.
    """
    path = Path(directory) / name
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing: load another step.")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not JSON ({error}): load another step.") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"{path} must contain a JSON object, but contains {str(content)[:80]}: load another "
            "step."
        )
    return content


def count_bytes_below(directory: Path) -> int:
    """Return the total size of the files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def format_size(num_bytes: int) -> str:
    """Return a size for messages.

    Example:
        >>> format_size(1572864)
        '1.5 MiB'
    """
    return f"{num_bytes / 2**20:.1f} MiB"
