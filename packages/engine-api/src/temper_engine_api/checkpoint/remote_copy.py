"""Upload and download of step directories with fsspec; uploading the manifest commits the copy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from temper_engine_api.checkpoint.manifest import MANIFEST_NAME, parse_manifest, read_manifest
from temper_engine_api.checkpoint.part_files import find_file_damage
from temper_engine_api.checkpoint.step_directories import STEP_NAME
from temper_engine_api.checkpoint.transaction import begin_checkpoint
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)


class FileSystem(Protocol):
    """Methods of an fsspec file system that are used here."""

    def exists(self, path: str) -> bool:
        """Return True if there is a file or folder."""

    def ls(self, path: str, detail: bool) -> list[str]:
        """List the paths in a folder."""

    def find(self, path: str) -> Iterable[str]:
        """List all files below a folder."""

    def makedirs(self, path: str, exist_ok: bool) -> None:
        """Create a folder; does nothing in object stores."""

    def cat_file(self, path: str) -> bytes:
        """Return a file's content."""

    def put_file(self, lpath: str, rpath: str) -> None:
        """Upload a file."""

    def get_file(self, rpath: str, lpath: str) -> None:
        """Download a file."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""


def upload(directory: Path, url: str) -> str:
    """Upload a committed step directory, its manifest last.

    Replaces files that an interrupted upload left for the same step. Uploaded copies are never
    pruned.

    Args:
        directory: Committed step directory.
        url: fsspec URL of the folder with step directories.

    Returns:
        URL of the copy.

    Raises:
        CheckpointError: If the step is already committed there, or its folder has other files.
    """
    files, base = _open(url)
    manifest = read_manifest(directory)
    target = f"{base}/{directory.name}"
    copy = f"{url.rstrip('/')}/{directory.name}"
    if files.exists(f"{target}/{MANIFEST_NAME}"):
        raise CheckpointError(
            f"{copy} already exists and is never overwritten: save to another URL. {directory} is "
            "complete."
        )
    present = (
        {path.removeprefix(f"{target}/") for path in files.find(target)}
        if files.exists(target)
        else set()
    )
    other_files = present - {record.path for record in manifest.files}
    if other_files:
        raise CheckpointError(
            f"{copy} contains {min(other_files)}, which is not a file of this step: save to "
            "another URL."
        )
    for record in manifest.files:
        path = f"{target}/{record.path}"
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.put_file(str(directory / record.path), path)
        if files.size(path) != record.num_bytes:
            raise CheckpointError(
                f"{copy}/{record.path} has {files.size(path)} bytes after the upload instead of "
                f"{record.num_bytes}: upload the step again."
            )
    # Last, because object stores cannot rename a folder: the manifest commits the copy.
    files.put_file(str(directory / MANIFEST_NAME), f"{target}/{MANIFEST_NAME}")
    return copy


def download(url: str, root: str | Path) -> Path:
    """Download a step directory, verify it, and commit it below `root`.

    Args:
        url: fsspec URL of a step directory, or of a folder whose latest complete step is taken.
        root: Local folder of step directories.

    Returns:
        The local step directory.

    Raises:
        IncompleteCheckpointError: If there is no committed step.
        DamagedCheckpointError: If a file is missing, short or altered.
        CheckpointError: If `root` already has that step, or the disk is full.
    """
    files, base = _open(url)
    source = _find_step(files, base, url)
    manifest = parse_manifest(
        files.cat_file(f"{source}/{MANIFEST_NAME}"), source=f"{url}: {MANIFEST_NAME}"
    )
    with begin_checkpoint(root, manifest.step) as transaction:
        for record in manifest.files:
            path = transaction.staging / record.path
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                files.get_file(f"{source}/{record.path}", str(path))
            except FileNotFoundError as error:
                raise DamagedCheckpointError(
                    f"{record.path} of {url} is missing: load another step."
                ) from error
            fault = find_file_damage(transaction.staging, record, with_content=True)
            if fault is not None:
                raise DamagedCheckpointError(f"{record.path} of {url} {fault}: load another step.")
        return transaction.publish(manifest)


def _find_step(files: FileSystem, base: str, url: str) -> str:
    if files.exists(f"{base}/{MANIFEST_NAME}"):
        return base
    entries = (
        [path.rstrip("/") for path in files.ls(base, detail=False)] if files.exists(base) else []
    )
    steps = {
        int(match[1]): path
        for path in entries
        if (match := STEP_NAME.fullmatch(path.rpartition("/")[2]))
    }
    # An interrupted upload has no manifest, so the newest folder may be incomplete.
    for step in sorted(steps, reverse=True):
        if files.exists(f"{steps[step]}/{MANIFEST_NAME}"):
            return steps[step]
    raise IncompleteCheckpointError(
        f"{url} has no committed step, because there is no {MANIFEST_NAME} in it or in a step "
        "below it: give the URL of a step directory or of a folder of them."
    )


def _open(url: str) -> tuple[FileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CheckpointError(
            f"{url} needs fsspec, which is not installed: pip install fsspec."
        ) from error
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url} can't be opened ({error}): check the URL.") from error
    return files, str(path).rstrip("/")
