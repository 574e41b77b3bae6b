"""The receipt next to an output.

Source, content carried and not carried, and a checksum of every file.

It lists the source, the converted and the omitted parts, and checksums of all files.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from temper_engine_api.checksums import has_checksum
from temper_legacy_shim.checkpoints.files.dist_ckpt import DESCRIPTION, DistCheckpoint
from temper_legacy_shim.checkpoints.files.hashed_files import WrittenFile
from temper_legacy_shim.checkpoints.huggingface import model_directory
from temper_legacy_shim.checkpoints.layouts import RECEIPT, Kind, Role
from temper_legacy_shim.errors import LayoutError, ShimError, VerificationError

NAME = RECEIPT
SCHEMA_VERSION = 2
"""Version 1, of temper-legacy-shim 0.1.0, had a SHA-256 of each file under ``sha256``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    path: str
    role: str
    layout: str
    version: str
    reasons: tuple[str, ...]
    step: int | None
    world_size: int
    """Ranks whose files held the weights."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    source: SourceRecord
    target: str
    """hf, peft or temper."""
    options: dict[str, object]
    files: tuple[WrittenFile, ...]
    """Every file of the output but this one."""
    head: str
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    carried: tuple[str, ...] = ()
    """Content of the old checkpoint in the output, a phrase each."""
    not_carried: tuple[str, ...] = ()
    """Content that is missing and why, a sentence each."""
    notes: tuple[str, ...] = ()
    verified: tuple[str, ...] = field(default=())
    tool: str = ""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_receipt(directory: Path) -> Receipt:
    """Return the receipt in a directory.

    Raises:
        LayoutError: there is none.
        VerificationError: the file is damaged.
    """
    path = directory / NAME
    if not os.path.isfile(path):
        raise LayoutError(
            f"{directory} has no {NAME}: give a directory that `temper-migrate checkpoint` wrote."
        )
    try:
        body = json.loads(path.read_bytes())
        if body["schema_version"] > SCHEMA_VERSION:
            raise VerificationError(
                f"{path} has schema version {body['schema_version']}; this version reads "
                f"{SCHEMA_VERSION}: install a newer one."
            )
        body["source"] = SourceRecord(
            **{**body["source"], "reasons": tuple(body["source"]["reasons"])}
        )
        body["files"] = tuple(_recorded(file) for file in body["files"])
        for name in ("dtypes", "carried", "not_carried", "notes", "verified"):
            body[name] = tuple(body[name])
        return Receipt(**body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VerificationError(f"{path} can't be read ({error}): it was altered.") from error


def _recorded(entry: dict[str, Any]) -> WrittenFile:
    older = {"checksum": f"sha256:{entry['sha256']}"} if "sha256" in entry else {}
    rest = {name: value for name, value in entry.items() if name != "sha256"}
    file = WrittenFile(**{**rest, **older, "with_nan": tuple(entry["with_nan"])})
    if not all(isinstance(text, str) for text in (file.path, file.checksum)):
        raise TypeError("a file's path or checksum is no text")
    if not all(isinstance(number, int) for number in (file.num_bytes, file.num_tensors)):
        raise TypeError(f"a number of {file.path[:200]!r} is none")
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of a comparison of an output with its receipt."""

    num_tensors: int
    surplus: tuple[str, ...]
    """Files the receipt does not know: relative paths."""


def check_receipt(directory: Path, made: Receipt, *, with_content: bool = True) -> Checked:
    """Compare an output with its receipt.

    Args:
        directory: of the output.
        made: its receipt.
        with_content: compare checksums too.

    Raises:
        VerificationError: the receipt names no file or another number of tensors, or a file is
            missing, short or altered.
    """
    if not made.files:
        raise VerificationError(f"{directory / NAME} names no file: it was altered; convert again.")
    result = check_files(directory, made.files, with_content=with_content)
    if result != made.num_tensors:
        raise VerificationError(
            f"{directory} holds {result} tensors instead of {made.num_tensors}: its receipt was "
            "altered; convert again."
        )
    present = {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()
    }
    return Checked(
        num_tensors=result,
        surplus=tuple(sorted(present - {NAME} - {file.path for file in made.files})),
    )


def check_files(
    directory: Path,
    files: Sequence[WrittenFile],
    *,
    with_content: bool = True,
    compared: Collection[str] = frozenset(),
) -> int:
    """Compare every file with its record; the number of tensors that were found.

    Args:
        directory: of the output.
        files: as they were recorded.
        with_content: compare checksums too.
        compared: paths of files that were compared during writing, of which
            the checksum need not be made again.

    Raises:
        VerificationError: naming the first file that is missing, short or altered.
    """
    num_tensors = 0
    for record in files:
        pure = PurePosixPath(record.path)
        if pure.is_absolute() or ".." in pure.parts:
            raise VerificationError(
                f"the receipt names {record.path!r}, which lies outside {directory}: it was "
                "altered."
            )
        path = directory / record.path
        if not os.path.isfile(path):
            raise VerificationError(f"{path} is missing: convert again.")
        size = path.stat().st_size
        if size != record.num_bytes:
            raise VerificationError(
                f"{path} has {size} bytes instead of {record.num_bytes}: convert again."
            )
        if with_content and record.path not in compared and not has_checksum(path, record.checksum):
            raise VerificationError(
                f"{path} has another checksum than when it was written: convert again."
            )
        if path.suffix == ".safetensors":
            num_tensors += _count_tensors(path, record)
        elif path.name == DESCRIPTION:
            num_tensors += _count_described(path)
    return num_tensors


def _count_tensors(path: Path, record: WrittenFile) -> int:
    try:
        result = len(model_directory.read_safetensors(path))
    except ShimError as error:
        raise VerificationError(f"{path} can't be read back: {error}") from error
    if result != record.num_tensors:
        raise VerificationError(
            f"{path} holds {result} tensors instead of {record.num_tensors}: convert again."
        )
    return result


def _count_described(path: Path) -> int:
    try:
        return len(DistCheckpoint(path.parent).tensors)
    except ShimError as error:
        raise VerificationError(f"{path.parent} can't be read back: {error}") from error


def source_record(role: Role) -> SourceRecord:
    return SourceRecord(
        path=str(role.path.resolve()),
        role=role.name,
        layout=str(role.kind),
        version=role.version,
        reasons=role.reasons,
        step=role.step,
        world_size=role.world_size,
        num_bytes=sum(path.stat().st_size for path in source_files(role)),
    )


def source_files(role: Role) -> list[Path]:
    """Return every file that the weights may come from."""
    result = list(role.fsdp_files.get("model", {}).values())
    result += [file.path for file in (*role.rank_files, *role.adapter_files)]
    for folder in role.dist_folders:
        result += sorted(path for path in folder.iterdir() if path.is_file())
    if role.kind == Kind.HUGGINGFACE:
        result += sorted(
            path for path in role.path.rglob("*") if path.suffix in (".safetensors", ".bin")
        )
    return result


def tool_version() -> str:
    """Name and version of this package."""
    try:
        return f"temper-legacy-shim {version('temper-legacy-shim')}"
    except PackageNotFoundError:
        return "temper-legacy-shim, not installed"
