"""Write a step directory as a transaction.

One process calls `begin_checkpoint`. Every participant writes its part into the staging directory
and reports its files. The first process then calls `commit`, which checks the files, writes the
manifest and renames the directory. A crash at any time leaves earlier steps as they were.
"""

import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from temper_engine_api.checkpoint.damaged_steps import describe_damaged_steps
from temper_engine_api.checkpoint.manifest import MANIFEST_NAME, Manifest, ManifestInfo
from temper_engine_api.checkpoint.part_files import (
    FileRecord,
    PartReport,
    count_bytes_below,
    find_file_damage,
    format_size,
)
from temper_engine_api.checkpoint.step_directories import (
    MARKER_NAME,
    find_latest_step,
    list_partial_saves,
    make_partial_path,
    step_directory,
)
from temper_engine_api.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTransaction:
    """A step that is being written.

    Only the process that created the transaction can commit or abort it. Other processes get only
    the path of the staging directory. Leaving its `with` block without a commit aborts it.
    """

    step: int
    staging: Path
    """Directory to write to; all participants must see it."""
    final: Path
    """Path of the step directory after the commit."""

    def __enter__(self) -> "CheckpointTransaction":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Abort if not committed; turn an OSError, such as a full disk, into a CheckpointError."""
        try:
            if isinstance(error, OSError):
                raise self.make_error(str(error)) from error
        finally:
            self.abort()

    def open_part(self, name: str) -> Path:
        """Return one participant's directory; create it if it does not exist."""
        return open_part(self.staging, name)

    def commit(self, reports: Mapping[str, Sequence[PartReport]], *, info: ManifestInfo) -> Path:
        """Check the reported files, write the manifest, and rename the directory.

        Args:
            reports: Reports from all ranks that wrote, by part.
            info: Other manifest contents.

        Returns:
            The committed step directory.

        Raises:
            CheckpointError: If a reported file is missing or short, there is an unreported file, or
                another save has committed this step.
        """
        return self.publish(Manifest(step=self.step, info=info, files=_collect(reports)))

    def publish(self, manifest: Manifest) -> Path:
        """Commit with an existing manifest; otherwise like `commit`."""
        files = manifest.files
        self._check(files)
        # fsync of a file does not make its name durable; for that, its directory needs fsync.
        for directory in {self.staging, *((self.staging / record.path).parent for record in files)}:
            sync_directory(directory)
        # Write the manifest last, because it promises that the files and directories are on disk.
        write_durably(self.staging / MANIFEST_NAME, manifest.to_json())
        try:
            # The rename is the commit: atomic on POSIX, and it fails if the target has files.
            os.rename(self.staging, self.final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{self.final} was committed by another run meanwhile, so this save is discarded: "
                "give each run its own folder."
            ) from error
        # Removed after the rename: until then it marks the directory as an unfinished save.
        (self.final / MARKER_NAME).unlink()
        sync_directory(self.final.parent)
        logger.info("saved step %d to %s", self.step, self.final)
        return self.final

    def abort(self) -> None:
        """Remove the staging directory; does nothing after a commit."""
        # Errors are ignored because they would hide the save's error, which is more useful.
        shutil.rmtree(self.staging, ignore_errors=True)

    def make_error(self, reason: str) -> CheckpointError:
        """Return the error for a failed save, including disk usage. Call before `abort`."""
        root = self.final.parent
        last, damaged = find_latest_step(root), describe_damaged_steps(root)
        written = format_size(count_bytes_below(self.staging))
        free = format_size(shutil.disk_usage(root).free)
        usage = [f"{written} of the step were written and {free} are free at {root}"]
        if last is not None:
            size = format_size(count_bytes_below(step_directory(root, last)))
            usage.append(f"step {last} takes {size}")
        usage += [] if damaged is None else [damaged]
        return CheckpointError(
            f"step {self.step} could not be saved: {reason.rstrip('.')}. {'; '.join(usage)}. Free "
            "space there or save elsewhere. Earlier steps have not changed."
        )

    def _check(self, files: Sequence[FileRecord]) -> None:
        for record in files:
            fault = find_file_damage(self.staging, record, with_content=False)
            if fault is not None:
                raise CheckpointError(
                    f"{record.path} {fault}, so step {self.step} is not committed: check that all "
                    "participants write to the same file system."
                )
        known = {record.path for record in files} | {MARKER_NAME}
        present = {
            path.relative_to(self.staging).as_posix()
            for path in self.staging.rglob("*")
            if not path.is_dir()
        }
        if present - known:
            raise CheckpointError(
                f"no participant reported {min(present - known)}, so step {self.step} is not "
                "committed: pass every written file to report_part()."
            )


def begin_checkpoint(
    root: str | Path, step: int, *, run_id: str | None = None
) -> CheckpointTransaction:
    """Start writing a step; create the root folder if it does not exist.

    Args:
        root: Folder of step directories.
        step: Global step.
        run_id: Id of the run. After a crash, a run may delete its own unfinished step.

    Raises:
        CheckpointError: If the step's directory already exists; it is never overwritten.
    """
    final = step_directory(root, step)
    if final.exists():
        raise CheckpointError(
            f"{final} already exists and is never overwritten: save to another folder, or remove "
            "it first."
        )
    for partial in list_partial_saves(root):
        logger.warning("%s was never committed: its run died, or is still saving", partial)
    staging = make_partial_path(root, step)
    # exist_ok is not set, because the name is random: a directory that exists is not from this
    # save.
    staging.mkdir(parents=True)
    (staging / MARKER_NAME).write_text(run_id or "")
    return CheckpointTransaction(step=step, staging=staging, final=final)


def open_part(staging: Path, name: str) -> Path:
    """Return one participant's directory in a save; create it if it does not exist."""
    directory = staging / name
    # parents is not set, so that a rank that is late cannot create the directory of an aborted save
    # again.
    directory.mkdir(exist_ok=True)
    return directory


def write_durably(path: Path, content: str) -> None:
    """Write a small file atomically and fsync it."""
    temporary = path.with_name(f"{path.name}.draft")
    with open(temporary, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    # Readers see the old or the new content, never a part of it.
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that created and renamed entries survive a crash."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _collect(reports: Mapping[str, Sequence[PartReport]]) -> tuple[FileRecord, ...]:
    by_path: dict[str, FileRecord] = {}
    for part, of_ranks in reports.items():
        for record in (
            replace(r, path=f"{part}/{r.path}") for report in of_ranks for r in report.files
        ):
            if by_path.setdefault(record.path, record) != record:
                raise CheckpointError(
                    f"two ranks wrote {record.path} with different content: give each rank its own "
                    "files."
                )
    return tuple(by_path[path] for path in sorted(by_path))
