"""Where steps lie under a root, which of them are whole, and which may go: always computed from the disk.

``step_00000010`` is committed; ``.step_00000010.<random>.partial`` is being written, or was when a run died.
"""

import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from temper_engine_api.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from temper_engine_api.errors import CheckpointError, ConfigError, DamagedCheckpointError, IncompleteCheckpointError

logger = logging.getLogger(__name__)

MARKER_NAME = ".temper-partial"
"""Lies in every directory that is not committed yet: we made it, so prune may remove it."""
STEP_NAME = re.compile(r"step_(\d{8,})")
"""Name of a committed step directory."""
_PARTIAL = re.compile(r"\.step_\d{8,}\.[0-9a-f]+\.partial")


def step_directory(root: str | Path, step: int) -> Path:
    """Where a step lies once it is committed.

    Raises:
        ConfigError: step is negative, or the root is a URL.
    """
    if step < 0:
        raise ConfigError(f"step is {step}, but steps count from 0.")
    return _folder(root) / f"step_{step:08d}"


def partial_directory(root: str | Path, step: int) -> Path:
    """A name beside it that no one else uses."""
    final = step_directory(root, step)
    return final.with_name(f".{final.name}.{secrets.token_hex(6)}.partial")


def complete_steps(root: str | Path) -> list[int]:
    """Steps that have a manifest, ascending."""
    if not Path(root).is_dir():
        return []
    named = ((STEP_NAME.fullmatch(path.name), path) for path in Path(root).iterdir())
    return sorted(int(match[1]) for match, path in named if match and (path / MANIFEST_NAME).is_file())


def last_complete_step(root: str | Path) -> int | None:
    """The highest step that has a manifest; None when there is none."""
    steps = complete_steps(root)
    return steps[-1] if steps else None


def leftovers(root: str | Path) -> list[Path]:
    """Directories of saves that have not been committed: running now, or of a run that died."""
    if not Path(root).is_dir():
        return []
    return sorted(path for path in Path(root).iterdir() if _PARTIAL.fullmatch(path.name) and path.is_dir())


def find_step(path: str | Path) -> Path:
    """The step directory that a path means: itself, or the last complete step of the folder.

    Raises:
        IncompleteCheckpointError: there is no complete step; says what is there instead.
        ConfigError: the path is a URL.
    """
    path = _folder(path)
    if (path / MANIFEST_NAME).is_file():
        return path
    last = last_complete_step(path)
    if last is not None and not STEP_NAME.fullmatch(path.name):
        return step_directory(path, last)
    if not path.is_dir():
        raise IncompleteCheckpointError(f"{path} does not exist: give a step directory or a folder of them.")
    present = sorted(entry.name for entry in path.iterdir())
    raise IncompleteCheckpointError(
        f"{path} holds no complete step (a directory step_NNNNNNNN with {MANIFEST_NAME}); it holds {present[:8] or 'nothing'}."
    )


def prune(root: str | Path, *, max_to_keep: int) -> list[int]:
    """Remove the oldest complete steps, and what died before its commit; never the last complete step, never what we did not write.

    A step with a damaged manifest, or with a file that its manifest does not name, is left alone and reported.

    Args:
        root: folder of step directories. No save may be running in it.
        max_to_keep: complete steps to keep, at least 1.

    Returns:
        The removed steps.

    Raises:
        ConfigError: max_to_keep is below 1.
    """
    if max_to_keep < 1:
        raise ConfigError(f"max_ckpt_to_keep is {max_to_keep}, but at least 1 is kept: null keeps all.")
    for partial in leftovers(root):
        if (partial / MARKER_NAME).is_file():
            logger.info("removing %s, which was never committed", partial)
            shutil.rmtree(partial)
    whole = {step: manifest for step in complete_steps(root) if (manifest := _readable(root, step)) is not None}
    return [step for step in sorted(whole)[:-max_to_keep] if _remove(root, step, whole[step])]


def remove_step(directory: Path, manifest: Manifest) -> None:
    """Remove a step directory: out of sight in one move, then file by file, so that a crash never leaves half a step."""
    (directory / MARKER_NAME).touch()
    hidden = partial_directory(directory.parent, manifest.step)
    os.rename(directory, hidden)
    shutil.rmtree(hidden)


def _readable(root: str | Path, step: int) -> Manifest | None:
    try:
        return read_manifest(step_directory(root, step))
    except (IncompleteCheckpointError, DamagedCheckpointError, CheckpointError) as error:
        logger.warning("step %d is left alone: %s", step, error)
        return None


def _remove(root: str | Path, step: int, manifest: Manifest) -> bool:
    directory = step_directory(root, step)
    ours = {record.path for record in manifest.files} | {MANIFEST_NAME, MARKER_NAME}
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if present - ours:
        logger.warning("%s is kept: %s is not ours to delete", directory, min(present - ours))
        return False
    remove_step(directory, manifest)
    return True


def _folder(path: str | Path) -> Path:
    # As a path it would be a folder of that name below the working directory.
    if "://" in str(path):
        raise ConfigError(f"{path} is a URL, but a folder of this machine is wanted here: give one, and the URL as hdfs_path.")
    return Path(path)
