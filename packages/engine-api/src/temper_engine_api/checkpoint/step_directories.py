"""List, lock, rename and delete the step directories below a root folder.

There is no cache: every call reads the disk, because several processes use the same folder.

========================================  ====================================================
``step_00000010``                         committed
``.step_00000010.<random>.partial``       being written, or left by a run that died
``step_00000010.damaged-1``               renamed by ``set_aside``; or ``incomplete``, etc.
========================================  ====================================================
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

from temper_engine_api.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_not_another_system,
    make_unreadable_error,
    open_manifest,
    read_manifest,
    verify,
)
from temper_engine_api.errors import CheckpointError, ConfigError, IncompleteCheckpointError

logger = logging.getLogger(__name__)

MARKER_NAME = ".temper-partial"
"""File in every directory that is not committed yet. The file has the id of the writing run, and
only that run deletes the directory."""
INVENTORY_NAME = ".temper-files"
"""File with path, size and modification time for all files of a killed save. It is written when the
directory is renamed, to tell the run's files from those that are added or changed later."""
STEP_NAME = re.compile(r"step_(\d{8,})")
"""Name of a committed step directory."""
_PARTIAL = re.compile(r"\.(step_\d{8,})\.[0-9a-f]+\.partial")
_CONTROL_FILES = frozenset({MARKER_NAME, INVENTORY_NAME, MANIFEST_NAME})
_INCOMPLETE = re.compile(r"step_\d{8,}\.incomplete-\d+")


def step_directory(root: str | Path, step: int) -> Path:
    """Return the path of a committed step.

    Raises:
        ConfigError: If the step is negative or the root is a URL.
    """
    if step < 0:
        raise ConfigError(f"step is {step}, but steps count from 0.")
    return _folder(root) / f"step_{step:08d}"


def make_partial_path(root: str | Path, step: int) -> Path:
    """Return a new unique path next to the step directory, for writing the step."""
    # Use the same folder, because a rename is atomic only within one file system, and a random name
    # to not overwrite anything.
    final = step_directory(root, step)
    return final.with_name(f".{final.name}.{secrets.token_hex(6)}.partial")


def list_complete_steps(root: str | Path) -> list[int]:
    """List the steps that have a manifest, in ascending order."""
    if not Path(root).is_dir():
        return []
    named = ((STEP_NAME.fullmatch(path.name), path) for path in Path(root).iterdir())
    return sorted(
        int(match[1]) for match, path in named if match and (path / MANIFEST_NAME).is_file()
    )


def list_step_entries(root: str | Path) -> dict[int, Path]:
    """Return all entries named like a step, complete or not, by ascending step."""
    if not Path(root).is_dir():
        return {}
    named = ((STEP_NAME.fullmatch(path.name), path) for path in Path(root).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def set_aside(path: Path, reason: Literal["damaged", "incomplete", "superseded"]) -> Path:
    """Rename a step directory or a crashed save's directory, so that its name can be used again.

    Returns:
        The new path, ``step_NNNNNNNN.<reason>-<number>``, with the first free number.
    """
    match = _PARTIAL.fullmatch(path.name)
    if match:
        _write_inventory(path)
    stem, number = match[1] if match else path.name, 1
    while os.path.lexists(renamed := path.with_name(f"{stem}.{reason}-{number}")):
        number += 1
    os.rename(path, renamed)
    return renamed


def find_latest_step(root: str | Path) -> int | None:
    """Return the highest step that has a manifest, or None."""
    steps = list_complete_steps(root)
    return steps[-1] if steps else None


def list_partial_saves(root: str | Path) -> list[Path]:
    """List directories of uncommitted saves, which are running or left by crashed runs."""
    if not Path(root).is_dir():
        return []
    return sorted(
        path for path in Path(root).iterdir() if _PARTIAL.fullmatch(path.name) and path.is_dir()
    )


def find_step(path: str | Path) -> Path:
    """Return the step directory for a path: the path itself, or the latest complete step in it.

    Raises:
        IncompleteCheckpointError: If there is no complete step; lists the folder's entries.
        ConfigError: If the path is a URL.
    """
    path = _folder(path)
    if (path / MANIFEST_NAME).is_file():
        return path
    last = find_latest_step(path)
    if last is not None and not STEP_NAME.fullmatch(path.name):
        return step_directory(path, last)
    if not path.is_dir():
        raise IncompleteCheckpointError(
            f"{path} does not exist: give a step directory or a folder of them."
        )
    check_not_another_system(path)
    present = sorted(entry.name for entry in path.iterdir())
    raise IncompleteCheckpointError(
        f"{path} has no complete step, which is a directory step_NNNNNNNN with {MANIFEST_NAME}; it "
        f"contains {present[:8] or 'nothing'}. Give a step directory or a folder of them."
    )


def prune(
    root: str | Path,
    *,
    max_to_keep: int,
    run_id: str | None = None,
    keep_every: int = 0,
    check: Callable[[Path], object] | None = None,
) -> list[int]:
    """Delete a run's old complete steps, and leftovers of its killed saves and deletions.

    Keep the newest steps until `max_to_keep` of them have passed `check`, including those that
    fail it. Delete this run's older steps, damaged or not. Never delete permanent steps, steps that
    are being read, symbolic links, steps of other runs, steps with an unreadable manifest, and
    directories with files that their manifest does not list.

    Delete the directory of a killed save or deletion if it has this run's marker and no foreign
    file: each file is in the manifest, or existed when `set_aside` renamed the directory.

    Args:
        root: Folder of step directories. No save may be running in it.
        max_to_keep: Number of steps to keep that pass `check`, at least 1.
        run_id: Delete only directories with this run id; None for directories without a run id.
        keep_every: Never delete steps that are a multiple of this; 0 disables it.
        check: Raises CheckpointError for a step that must not count towards `max_to_keep`. None
            compares file sizes with the manifest, without reading the files.

    Returns:
        The deleted steps.

    Raises:
        ConfigError: If max_to_keep is below 1.
    """
    if max_to_keep < 1:
        raise ConfigError(
            f"max_ckpt_to_keep is {max_to_keep}, but must be at least 1, or null to keep all."
        )
    _delete_own(list_partial_saves(root), run_id=run_id)
    delete_killed_saves(root, run_id=run_id)
    manifests = {
        step: _try_read_manifest(step_directory(root, step)) for step in list_complete_steps(root)
    }
    own = {s: m for s, m in manifests.items() if m is not None and m.info.run_id == run_id}
    if len(own) <= max_to_keep:
        return []
    num_kept, deleted = 0, []
    # Start with the newest, to delete an old step only after enough newer ones have passed.
    for step, manifest in sorted(own.items(), reverse=True):
        if num_kept < max_to_keep:
            num_kept += _passes(check or _check_sizes, step_directory(root, step))
        elif not (keep_every and step % keep_every == 0) and remove_step(
            step_directory(root, step), manifest
        ):
            deleted.append(step)
    return sorted(deleted)


def delete_killed_saves(root: str | Path, *, run_id: str | None = None) -> None:
    """Delete a run's killed saves and deletions that `set_aside` has renamed.

    Unlike `prune`, this may be called while a save is running. `prune` describes which files belong
    to the run.
    """
    _delete_own(_list_renamed_partials(root), run_id=run_id)


def _delete_own(partials: Iterable[Path], *, run_id: str | None) -> None:
    for partial in partials:
        # Don't follow a link: it may lead to a folder that this run did not write.
        if not partial.is_symlink() and _read_owner(partial) == (run_id or ""):
            _delete_uncommitted(partial)


def remove_step(directory: Path, manifest: Manifest, *, is_read: bool = False) -> bool:
    """Delete a step and return True, unless it is being read, has other files, or is a link.

    Args:
        directory: The step.
        manifest: Manifest of the step.
        is_read: True if all ranks have loaded the step. It is then deleted although they still
            hold their read locks.
    """
    if directory.is_symlink():
        # Deleting would go through the link to an archive that this run did not write.
        logger.info("%s is kept: it is a symbolic link", directory)
        return False
    known = {record.path for record in manifest.files} | _CONTROL_FILES
    if added := _files_below(directory).keys() - known:
        logger.warning("%s is kept: %s is not a file of this step", directory, min(added))
        return False
    # Open for writing, because NFS needs that for an exclusive lock.
    with open(directory / MANIFEST_NAME, "rb+") as file:
        if not is_read and _lock(file, fcntl.LOCK_EX) is False:
            logger.info("%s is kept for now: another process is reading it", directory)
            return False
        # Rename first, so that a crash never leaves half a step under a complete step's name.
        (directory / MARKER_NAME).write_text(manifest.info.run_id or "")
        hidden = make_partial_path(directory.parent, manifest.step)
        os.rename(directory, hidden)
    # Close the manifest first: NFS does not delete an open file, but renames it and keeps its
    # folder.
    _delete_files(hidden, known)
    return True


@contextmanager
def lock_for_reading(directory: str | Path) -> Iterator[None]:
    """Lock a step directory to keep other processes from deleting it inside the ``with`` block.

    Uses a shared ``flock`` on the manifest, which also works between NFS clients on Linux. On a
    file system without locks (some Lustre mounts), nothing is locked and a DEBUG message is logged.
    If other programs read checkpoints there, set ``max_ckpt_to_keep=None`` to never delete any.

    Raises:
        IncompleteCheckpointError: If the step has no manifest.
        DamagedCheckpointError: If the manifest is not a file, or its disk fails to read it.
        CheckpointError: If the step is being deleted, or cannot be read at the moment.
    """
    path = Path(directory) / MANIFEST_NAME
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_manifest(path))
            is_free = _lock(file, fcntl.LOCK_SH) is not False
            # If it was deleted between open and lock, the locked file no longer has this name.
            if not is_free or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise CheckpointError(
                    f"{directory} is being deleted by its run: load another step."
                )
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            check_not_another_system(directory)
            raise IncompleteCheckpointError(
                f"{directory} has no {MANIFEST_NAME}: load another step directory."
            ) from error
        except OSError as error:
            raise make_unreadable_error(path, error) from error
        yield


def _lock(file: IO[bytes], kind: int) -> bool | None:
    """Lock a file without waiting; None where the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        logger.debug("%s: this file system has no locks (%s)", file.name, error.strerror)
        return None
    return True


def _check_sizes(directory: Path) -> None:
    verify(directory, with_content=False)


def _passes(check: Callable[[Path], object], directory: Path) -> bool:
    try:
        check(directory)
    except CheckpointError as error:
        logger.warning("%s does not count among the checkpoints to keep: %s", directory, error)
        return False
    return True


def _read_owner(partial_step: Path) -> str | None:
    """Return the run id in an uncommitted directory's marker, or None without a marker."""
    try:
        return (partial_step / MARKER_NAME).read_text()
    except FileNotFoundError:
        return None


def _delete_uncommitted(directory: Path) -> None:
    """Delete the directory of a killed save or deletion, unless another program added a file."""
    present, known = _files_below(directory), set(_CONTROL_FILES)
    # There is a manifest if a deletion or the final rename of a save was interrupted.
    if MANIFEST_NAME in present:
        manifest = _try_read_manifest(directory)
        known |= set() if manifest is None else {record.path for record in manifest.files}
    if INVENTORY_NAME in present:
        listed = _read_inventory(directory)
        known |= {path for path, state in listed.items() if present.get(path) == state}
    if added := present.keys() - known:
        logger.warning(
            "%s is kept: %s is not known to be a file of this run", directory, min(added)
        )
        return
    logger.info("deleting %s, which was never committed", directory)
    _delete_files(directory, known)


def _delete_files(directory: Path, files: Iterable[str]) -> None:
    """Delete these files of a directory, then its folders.

    If other files appear meanwhile, they are kept and `rmdir` fails. Delete the control files last,
    so that `prune` can finish a killed deletion.
    """
    for name in sorted(set(files) - _CONTROL_FILES):
        (directory / name).unlink(missing_ok=True)
    for folder, _, _ in os.walk(directory, topdown=False):
        if folder != str(directory):
            os.rmdir(folder)
    for name in (INVENTORY_NAME, MANIFEST_NAME, MARKER_NAME):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


def _files_below(directory: Path) -> dict[str, list[int]]:
    """Return size and modification time by path, for all files and links below a directory."""
    states = {}
    for folder, folders, files in os.walk(directory):
        # os.walk lists links to directories as directories, but deleting one needs unlink.
        links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
        for path in (Path(folder, name) for name in (*files, *links)):
            # Use lstat, because a deletion removes the link and not its target.
            state = path.lstat()
            states[path.relative_to(directory).as_posix()] = [state.st_size, state.st_mtime_ns]
    return states


def _write_inventory(partial: Path) -> None:
    present = _files_below(partial)
    try:
        (partial / INVENTORY_NAME).write_text(json.dumps(present))
    except OSError as error:  # a full disk must not stop the start that renames it
        logger.warning("%s will not be deleted: its files cannot be listed (%s)", partial, error)
        # Remove a partial inventory. Without one, no unknown file is deleted.
        (partial / INVENTORY_NAME).unlink(missing_ok=True)


def _list_renamed_partials(root: str | Path) -> list[Path]:
    if not Path(root).is_dir():
        return []
    # Leave out files: `set_aside` also renames a file that has a step directory's name.
    return sorted(
        path for path in Path(root).iterdir() if _INCOMPLETE.fullmatch(path.name) and path.is_dir()
    )


def _read_inventory(partial: Path) -> Mapping[str, list[int]]:
    try:
        states: Mapping[str, list[int]] = json.loads((partial / INVENTORY_NAME).read_text())
    except (ValueError, RecursionError):  # killed while it was written, or damaged
        return {}
    return states


def _try_read_manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except CheckpointError as error:
        logger.warning("%s is not deleted: %s", directory, error)
        return None


def _folder(path: str | Path) -> Path:
    # Path() would turn a URL into a folder below the working directory.
    if "://" in str(path):
        raise ConfigError(
            f"{path} is a URL, but must be a local folder: give one, and the URL as hdfs_path."
        )
    return Path(path)
