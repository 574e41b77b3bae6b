"""Bound the disk space of steps that `set_aside` has renamed because they are damaged.

A damaged step is kept: part of its files may be readable. But a disk that damages one file often
damages more, and without a bound the renamed steps would take the space of the next saves.
"""

import logging
import re
from pathlib import Path

from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.checkpoint.part_files import count_bytes_below, format_size
from temper_engine_api.checkpoint.step_directories import remove_step
from temper_engine_api.errors import CheckpointError

logger = logging.getLogger(__name__)

NUM_DAMAGED_TO_KEEP = 2
"""Number of damaged steps per run that `delete_old_damaged_steps` keeps."""
_DAMAGED = re.compile(r"step_(\d{8,})\.damaged-(\d+)")


def list_damaged_steps(root: str | Path) -> list[Path]:
    """List the renamed damaged steps, by ascending step and then in the order of their renaming."""
    if not Path(root).is_dir():
        return []
    named = ((_DAMAGED.fullmatch(path.name), path) for path in Path(root).iterdir())
    numbered = [(int(match[1]), int(match[2]), path) for match, path in named if match]
    return [path for _, _, path in sorted(numbered)]


def delete_old_damaged_steps(
    root: str | Path,
    *,
    run_id: str | None = None,
    keep_every: int = 0,
    num_to_keep: int = NUM_DAMAGED_TO_KEEP,
) -> None:
    """Delete all but the newest damaged steps of a run; call after a commit.

    As in `prune`, only directories written by this run are deleted. Steps of other runs or without
    a readable manifest, directories with a file that is not in the manifest, and symbolic links are
    kept. Permanent steps are kept, too. None of these count toward `num_to_keep`.

    Args:
        root: Folder of step directories.
        run_id: Id of the run; None stands for steps without a run id.
        keep_every: Steps that are a multiple of this are permanent; 0 makes none permanent.
        num_to_keep: Number of the newest damaged steps to keep.
    """
    num_kept = 0
    for path in reversed(list_damaged_steps(root)):
        try:
            manifest = read_manifest(path)
        except CheckpointError:  # no one knows which run wrote it
            continue
        if manifest.info.run_id != run_id or (keep_every and manifest.step % keep_every == 0):
            continue
        if num_kept < num_to_keep:
            num_kept += 1
        elif remove_step(path, manifest):
            logger.info("%s, which is damaged, was deleted", path)


def measure_damaged_steps(root: str | Path) -> dict[Path, int]:
    """Return the size in bytes per renamed damaged step; 0 if the disk does not tell it."""
    return {path: _measure(path) for path in list_damaged_steps(root)}


def _measure(path: Path) -> int:
    try:
        return count_bytes_below(path)
    except OSError as error:  # a damaged disk must not end a start that has just passed it over
        logger.warning("the size of %s cannot be read (%s)", path, error)
        return 0


def describe_damaged_steps(root: str | Path) -> str | None:
    """Return how much space the renamed damaged steps take; None if there are none.

    Returns:
        As in "2 damaged checkpoints take 1.5 MiB (delete what you do not need: rm -r ...)".
    """
    sizes = measure_damaged_steps(root)
    if not sizes:
        return None
    noun, verb = ("checkpoint", "takes") if len(sizes) == 1 else ("checkpoints", "take")
    size = format_size(sum(sizes.values()))
    return (
        f"{len(sizes)} damaged {noun} {verb} {size} (delete what you do not need: rm -r "
        f"{root}/step_*.damaged-*)"
    )
