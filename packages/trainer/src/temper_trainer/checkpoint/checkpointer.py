"""Save checkpoints of a run, find the one to resume from, restore it, and delete old ones.

A step directory has one folder per role, written by its engine, and the trainer's own part. It is
written as a transaction (``temper_engine_api.checkpoint``). Engines can also be saved without a
trainer, and ``temper-migrate checkpoint`` writes such engine-only checkpoints; a run can resume
from them, too.
"""

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from temper_engine_api.checkpoint import (
    CheckpointTransaction,
    ManifestInfo,
    PartReport,
    begin_checkpoint,
    delete_killed_saves,
    delete_old_damaged_steps,
    describe_damaged_steps,
    list_complete_steps,
    list_package_versions,
    list_partial_saves,
    list_step_entries,
    lock_for_reading,
    prune,
    report_part,
    set_aside,
    verify,
)
from temper_engine_api.checkpoint.damaged_steps import list_damaged_steps, measure_damaged_steps
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.checkpoint.part_files import count_bytes_below, format_size
from temper_engine_api.checkpoint.step_directories import MARKER_NAME, STEP_NAME
from temper_engine_api.checkpoint.transaction import write_durably
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_trainer.checkpoint.step_contents import (
    STATE_FILE,
    TRAINER_PART,
    check_step,
    check_trainer_state,
    find_engine_checkpoints,
    find_role_parts,
    read_common_step,
)
from temper_trainer.checkpoint.trainer_state import TrainerState

logger = logging.getLogger(__name__)

RUN_ID_FILE = "run_id"
"""File in the run folder with the id that the run's checkpoints contain."""
_SAVE_MARGIN = 1.1
"""Free space needed for a save, as a multiple of the previous checkpoint's size."""
WritePart = Callable[[str], Sequence[PartReport]]
"""Writes the files of a role into a directory."""
ReadPart = Callable[[str], None]
"""Restores a role from a directory."""


@contextmanager
def abort_on_error(transaction: CheckpointTransaction) -> Iterator[None]:
    """Remove the staging directory if the body raises.

    Raises:
        CheckpointError: If the disk is full or a file can't be written; includes the disk usage.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        # Make the message before `abort` frees the disk space that it reports.
        failure = transaction.make_error(str(error))
        transaction.abort()
        raise failure from error
    except BaseException:
        transaction.abort()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """Saves, finds, restores and deletes the checkpoints for one phase of a run."""

    root: Path
    """Folder of the step directories."""
    max_to_keep: int | None
    """Number of the newest verified checkpoints to keep; None keeps all."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted; 0 disables it."""
    run_id: str | None = None
    """Id of the run; only checkpoints with this id are deleted."""
    verify: Callable[[Path], object] = verify
    """Compares a step directory with its manifest; raises DamagedCheckpointError."""
    _verified: set[Path] = field(default_factory=set, init=False)
    """Step directories whose files this process has read and hashed."""

    def save(
        self, state: TrainerState, *, roles: Mapping[str, WritePart], topology: Mapping[str, int]
    ) -> Path:
        """Save a step. An error leaves earlier steps untouched and removes the staging directory.

        Args:
            state: The trainer's part.
            roles: By role, the function that writes the role's files.
            topology: Data-parallel size per role, such as ``actor.dp``, recorded in the manifest.

        Raises:
            CheckpointError: If the disk is full or a file can't be written.
        """
        transaction = self.begin(state.step)
        with abort_on_error(transaction):
            return self.commit(
                transaction,
                state=state,
                parts={
                    name: write(str(transaction.open_part(name))) for name, write in roles.items()
                },
                topology=topology,
            )

    def begin(self, step: int) -> CheckpointTransaction:
        """Start a step's transaction.

        First delete leftovers of killed saves, and this run's damaged steps when disk space is
        short. Otherwise each restart would fail at this save on a full disk.

        Raises:
            CheckpointError: If the step's directory already exists.
        """
        if self.max_to_keep is not None:
            try:
                delete_killed_saves(self.root, run_id=self.run_id)
                self._delete_damaged_if_space_is_short()
            except OSError as error:
                logger.warning(
                    "killed saves and damaged checkpoints in %s could not be deleted: %s",
                    self.root,
                    error,
                )
        return begin_checkpoint(self.root, step, run_id=self.run_id)

    def commit(
        self,
        transaction: CheckpointTransaction,
        *,
        state: TrainerState,
        parts: Mapping[str, Sequence[PartReport]],
        topology: Mapping[str, int],
    ) -> Path:
        """Write the trainer's part, commit the step, and delete old checkpoints."""
        info = ManifestInfo(
            topology=topology,
            config_hash=state.config_digest,
            packages=list_package_versions(),
            run_id=self.run_id,
        )
        own = transaction.open_part(TRAINER_PART)
        (own / STATE_FILE).write_text(state.to_json())
        reports = {**parts, TRAINER_PART: [report_part(own, [STATE_FILE])]}
        committed = transaction.commit(reports, info=info)
        # The commit has read every file for its checksum. Don't verify again, to not double the
        # cost of a save.
        self._verified.add(committed)
        # Delete older steps after the commit. Until then, one of them may be the only complete one.
        self._delete_old()
        return committed

    def find(self, resume: str) -> Path | None:
        """Return the verified checkpoint to resume from; None starts at step 1.

        With ``auto``, rename damaged and incomplete checkpoints newer than the last good one, and
        warn if the next save may not fit on the disk next to them. With the path of an earlier step
        in this run, rename later steps. Each rename is logged as a warning; nothing is deleted.

        Args:
            resume: The value of ``run.resume``: ``never``, ``auto``, or a path.

        Raises:
            CheckpointError: If a file cannot be read at the moment, or this run would later have
                to save a step that already exists in its folder.
            IncompleteCheckpointError: If the path is not a committed checkpoint.
            DamagedCheckpointError: If the checkpoint at the path is damaged.
        """
        if resume != "never":
            self._rename_partial_saves()
        if resume == "auto":
            return self._find_newest_good()
        checkpoint = None if resume == "never" else self._check_requested(Path(resume))
        self._check_later_steps(checkpoint)
        return checkpoint

    def preview(self, resume: str) -> Path | None:
        """Return what `find` would return, without renaming anything.

        Raises:
            CheckpointError: In the cases of `find`, except if later steps already exist.
        """
        if resume == "never":
            return None
        if resume != "auto":
            return self._check_requested(Path(resume))
        for step, directory in sorted(list_step_entries(self.root).items(), reverse=True):
            try:
                with lock_for_reading(directory):
                    self._verify(directory)
                    check_step(directory, step=step)
            except (IncompleteCheckpointError, DamagedCheckpointError):
                continue
            return directory
        return None

    def _find_newest_good(self) -> Path | None:
        num_renamed, newest_good = 0, None
        for step, directory in sorted(list_step_entries(self.root).items(), reverse=True):
            try:
                with lock_for_reading(directory):
                    self._verify(directory)
                    check_step(directory, step=step)
            # Don't catch other errors, such as a file that can't be read at the moment: they are no
            # damage, so the run does not start and nothing is renamed.
            except IncompleteCheckpointError as error:
                self._rename(directory, "incomplete", cause=str(error))
            except DamagedCheckpointError as error:
                self._rename(directory, "damaged", cause=str(error))
            else:
                newest_good = directory
                break
            num_renamed += 1
        if num_renamed:
            self._warn_if_space_is_short()
        if num_renamed and newest_good is None:
            logger.warning(
                "no checkpoint in %s can be restored: all %d were renamed, none was deleted",
                self.root,
                num_renamed,
            )
        return newest_good

    def _delete_damaged_if_space_is_short(self) -> None:
        """Delete this run's damaged steps if the next save needs their space.

        Keep them when there is no good checkpoint, because they are all that is left of the run.
        """
        good, damaged = list_complete_steps(self.root), list_damaged_steps(self.root)
        if not (good and damaged):
            return
        free = shutil.disk_usage(self.root).free
        if free >= _SAVE_MARGIN * count_bytes_below(list_step_entries(self.root)[good[-1]]):
            return
        delete_old_damaged_steps(
            self.root, run_id=self.run_id, keep_every=self.keep_every, num_to_keep=0
        )
        if len(list_damaged_steps(self.root)) < len(damaged):
            logger.warning(
                "only %s were free in %s: damaged checkpoints of this run were deleted",
                format_size(free),
                self.root,
            )

    def _warn_if_space_is_short(self) -> None:
        """Warn if damaged checkpoints may leave too little space for the next save."""
        sizes = measure_damaged_steps(self.root).values()
        free = shutil.disk_usage(self.root).free
        # The next save takes about as much space as the largest damaged checkpoint.
        if sizes and free < max(sizes):
            logger.warning(
                "only %s are free in %s, where %s",
                format_size(free),
                self.root,
                describe_damaged_steps(self.root),
            )

    def _check_requested(self, checkpoint: Path) -> Path:
        is_own = self._is_in_run_folder(checkpoint)
        try:
            for directory in find_engine_checkpoints(checkpoint).values() or [checkpoint]:
                with lock_for_reading(directory):
                    self._verify(directory)
            if is_own:
                check_step(checkpoint, step=_parse_step(checkpoint.name))
        except (IncompleteCheckpointError, DamagedCheckpointError) as error:
            advice = (
                " run.resume=auto renames damaged checkpoints and continues from the newest good "
                "one."
            )
            raise type(error)(f"{error}{advice if is_own else ''}") from error
        return checkpoint

    def _check_later_steps(self, checkpoint: Path | None) -> None:
        """Rename the later steps in the run folder, or raise if another run may have written them.

        A run that resumes from a step in its own folder replaces the later steps there. Any other
        run would write existing steps again. This is checked at the start: if the next save failed
        instead, the steps trained until then would be lost.
        """
        done = 0 if checkpoint is None else self._read_step(checkpoint)
        later = [path for step, path in list_step_entries(self.root).items() if step > done]
        if checkpoint is not None and self._is_in_run_folder(checkpoint):
            for path in later:
                cause = f"run.resume names the earlier {checkpoint.name}"
                self._rename(path, "superseded", cause=cause)
        elif later:
            raise CheckpointError(
                f"{later[0]} exists already, but this run continues from step {done} and would "
                "write this step again: choose another run.dir, or move the checkpoints away: "
                f"mv {self.root} {self.root}.old"
            )

    def _is_in_run_folder(self, checkpoint: Path) -> bool:
        """Return True if a checkpoint is a step in this run folder."""
        is_step = STEP_NAME.fullmatch(checkpoint.name) is not None
        return is_step and checkpoint.resolve().parent == self.root.resolve()

    def _read_step(self, checkpoint: Path) -> int:
        step = self.read_engine_only_step(checkpoint)
        return read_manifest(checkpoint).step if step is None else step

    def _rename_partial_saves(self) -> None:
        # Safe, because this process holds the run folder's lock, so no other process writes them.
        # Folders without the marker belong to other programs.
        for path in list_partial_saves(self.root):
            if (path / MARKER_NAME).is_file():
                cause = "its run died while saving or deleting it"
                self._rename(path, "incomplete", cause=cause)

    def _rename(
        self,
        path: Path,
        reason: Literal["damaged", "incomplete", "superseded"],
        *,
        cause: str,
    ) -> None:
        try:
            renamed = set_aside(path, reason)
        except OSError as error:
            raise CheckpointError(
                f"{path} is {reason} and cannot be renamed ({error.strerror}): make {self.root} "
                "writable, or rename it yourself, and start again."
            ) from error
        # Shorten the cause: the warning has the path already, and the advice was just followed.
        cause = cause.replace(f"{path}/", "").replace(f"{path} ", "it ")
        cause = cause.removesuffix(": load another step directory.")
        logger.warning("checkpoint %s is %s (%s): renamed to %s", path, reason, cause, renamed.name)

    def _delete_old(self) -> None:
        """Delete old checkpoints; a failure is only a warning, because the save is complete."""
        if self.max_to_keep is None:
            return
        try:
            prune(
                self.root,
                max_to_keep=self.max_to_keep,
                run_id=self.run_id,
                keep_every=self.keep_every,
                check=self._verify_once,
            )
            delete_old_damaged_steps(self.root, run_id=self.run_id, keep_every=self.keep_every)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.root, error)

    def _verify(self, directory: Path) -> None:
        self.verify(directory)
        # Also read the trainer's state, because `verify` may only compare sizes.
        check_trainer_state(directory)
        self._verified.add(directory)

    def _verify_once(self, directory: Path) -> None:
        """Verify the content once per process, and only file sizes after that.

        Retention calls this at every save, where reading all kept steps would cost `max_to_keep`
        times the save's bytes. It misses a file that the disk damages later at the same size.
        `find` reads every file before a resume, so it detects that and uses another kept step. Keep
        at least two steps, which is the default.
        """
        if directory in self._verified:
            verify(directory, with_content=False)
        else:
            self._verify(directory)

    def read_completed_steps(self, directory: Path, *, phase: str) -> int:
        """Return the number of completed steps in a phase, from which a run continues.

        Raises:
            CheckpointError: If the checkpoint is from another phase, or its roles were saved at
                different steps.
        """
        step = self.read_engine_only_step(directory)
        return self.read_state(directory, phase=phase).step if step is None else step

    def read_engine_only_step(self, directory: Path) -> int | None:
        """Return the step of an engine-only checkpoint; None for a checkpoint with trainer state.

        Raises:
            CheckpointError: If the roles were saved at different steps.
        """
        checkpoints = find_engine_checkpoints(directory)
        return read_common_step(checkpoints) if checkpoints else None

    def read_state(self, directory: Path, *, phase: str) -> TrainerState:
        """Read the trainer's part of a step directory.

        Raises:
            CheckpointError: If there is none, or it is from another phase.
        """
        path = directory / TRAINER_PART / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no {TRAINER_PART}/{STATE_FILE}, so it is not a checkpoint of a "
                "run: resume from a checkpoint of a run, or from one that temper-migrate converted."
            )
        state = TrainerState.from_json(path.read_bytes())
        if state.phase != phase:
            raise CheckpointError(
                f"{directory} is a checkpoint of phase {state.phase}, but this run is in phase "
                f"{phase}: resume from a checkpoint of the same phase, or set "
                "actor.engine.model.path to the model directory that the other phase wrote."
            )
        return state

    def read_roles(self, directory: Path, *, roles: Mapping[str, ReadPart]) -> None:
        """Restore every role.

        Raises:
            CheckpointError: If the checkpoint lacks a role that this run has.
        """
        for name, part in find_role_parts(directory, roles).items():
            # Retention in another process must not delete the step while it is read.
            with lock_for_reading(part.parent):
                roles[name](str(part))


def check_resume_step(step: int, *, total_steps: int, checkpoint: Path | None) -> None:
    """Check that the checkpoint to resume from is not after the run's last step.

    Raises:
        CheckpointError: If it is.
    """
    if step > total_steps:
        raise CheckpointError(
            f"{checkpoint} is at step {step}, after run.total_steps = {total_steps}, so nothing is "
            "left to train: raise run.total_steps."
        )


def load_run_id(folder: Path) -> str:
    """Return the run id in a folder, created at its first start.

    If the file is empty or not text, for example after a crash of the host, rename it and create a
    new id.

    Raises:
        CheckpointError: If the file cannot be read or renamed.
    """
    path = folder / RUN_ID_FILE
    try:
        if os.path.lexists(path):
            if run_id := _parse_run_id(path.read_bytes()):
                return run_id
            renamed = set_aside(path, "damaged")
            logger.warning(
                "%s is damaged: renamed to %s. The run gets a new id, and does not delete the "
                "checkpoints that it saved under the old one.",
                path,
                renamed.name,
            )
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read or renamed ({error.strerror}): fix the permission or the file "
            "system, or rename it yourself, and start again."
        ) from error
    run_id = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(path, f"{run_id}\n")
    return run_id


def _parse_run_id(content: bytes) -> str | None:
    """Return the id, or None if this is not a line of text."""
    try:
        run_id = content.decode().strip()
    except UnicodeDecodeError:
        return None
    # Zeros, which some file systems leave after a crash, are valid UTF-8 but not printable.
    return run_id if run_id and run_id.isprintable() else None


def _parse_step(name: str) -> int:
    match = STEP_NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
