"""Checkpoints of a run: saving every role's part and the trainer's state, resuming, retention."""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from temper_engine_api.checkpoint import (
    ENGINE_PART,
    ManifestInfo,
    PartReport,
    Transaction,
    begin,
    complete_steps,
    leftovers,
    package_versions,
    prune,
    reading,
    report_part,
    set_aside,
    step_directory,
    step_entries,
    verify,
)
from temper_engine_api.checkpoint.layout import MARKER_NAME, STEP_NAME
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.checkpoint.transaction import write_durably
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_trainer.checkpoint.alone import step_of, steps_alone
from temper_trainer.checkpoint.state import TrainerState

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
TRAINER_PART = "trainer"
RUN_ID_FILE = "run_id"
"""File of a run folder that holds the id which its checkpoints name."""
WritePart = Callable[[str], Sequence[PartReport]]
"""Writes a role's files into the directory it is given."""
ReadPart = Callable[[str], None]
"""Restores a role from the directory it is given."""


@contextmanager
def guarded(transaction: Transaction) -> Iterator[None]:
    """On any error inside, remove the staging directory; one of writing says what the disk has to say.

    Raises:
        CheckpointError: the disk is full or a file can't be written.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        failure = transaction.failure(str(error))
        transaction.abort()
        raise failure from error
    except BaseException:
        transaction.abort()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """The checkpoints of one phase of a run: saving, resuming, deleting old ones."""

    root: Path
    """Folder of step directories."""
    max_to_keep: int | None
    """Newest verified checkpoints to keep; None keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that are a multiple of this are never deleted; 0 names none."""
    run_id: str | None = None
    """Run that writes them: only its own checkpoints are deleted."""
    verify: Callable[[Path], object] = verify
    """Compares a step directory with its manifest; raises DamagedCheckpointError."""
    _verified: set[Path] = field(default_factory=set, init=False)
    """Step directories whose content this process has read and hashed, at their save or later."""

    def save(
        self, state: TrainerState, *, roles: Mapping[str, WritePart], topology: Mapping[str, int]
    ) -> Path:
        """One transaction; on any error the earlier steps are untouched and only our own staging directory is removed.

        Args:
            state: the trainer's part.
            roles: how each role writes its part.
            topology: sizes by role, for the manifest.

        Raises:
            CheckpointError: the disk is full or a file can't be written.
        """
        transaction = self.begin(state.step)
        with guarded(transaction):
            return self.commit(
                transaction,
                state=state,
                parts={name: write(str(transaction.part(name))) for name, write in roles.items()},
                topology=topology,
            )

    def begin(self, step: int) -> Transaction:
        """Begin to write a step.

        Raises:
            CheckpointError: If the step's directory already exists.
        """
        return begin(self.root, step, run_id=self.run_id)

    def commit(
        self,
        transaction: Transaction,
        *,
        state: TrainerState,
        parts: Mapping[str, Sequence[PartReport]],
        topology: Mapping[str, int],
    ) -> Path:
        """Add the trainer's part to those of the roles, commit the step, and delete old ones."""
        info = ManifestInfo(
            topology=topology,
            config_hash=state.config_digest,
            packages=package_versions(),
            run_id=self.run_id,
        )
        own = transaction.part(TRAINER_PART)
        (own / STATE_FILE).write_text(state.to_json())
        reports = {**parts, TRAINER_PART: [report_part(own, [STATE_FILE])]}
        committed = transaction.commit(reports, info=info)
        # Every file was read back for its checksum; a second time would cost as much as the save.
        self._verified.add(committed)
        self._delete_old()
        return committed

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint that ``run.resume`` means, verified; None begins at step 1.

        With ``auto``, damaged and incomplete checkpoints that are newer than the last good one are
        renamed. With the path of an earlier step of this run, the later steps are renamed. Nothing
        is deleted, and one warning is logged for each.

        Raises:
            CheckpointError: If a file cannot be read at the moment, or this run would later have
                to save a step that already exists in its folder.
            IncompleteCheckpointError: If a path names no committed checkpoint.
            DamagedCheckpointError: If the checkpoint that a path names is damaged.
        """
        if resume != "never":
            self._set_partials_aside()
        if resume == "auto":
            return self._newest_good()
        found = None if resume == "never" else self._named(Path(resume))
        self._check_free(found)
        return found

    def _newest_good(self) -> Path | None:
        num_renamed = 0
        for step, directory in sorted(step_entries(self.root).items(), reverse=True):
            try:
                with reading(directory):
                    self._verify(directory)
                    _check_name(directory, step=step)
            except IncompleteCheckpointError as error:
                self._set_aside(directory, "incomplete", cause=str(error))
            except DamagedCheckpointError as error:
                self._set_aside(directory, "damaged", cause=str(error))
            else:
                return directory
            num_renamed += 1
        if num_renamed:
            logger.warning(
                "no checkpoint in %s can be restored: all %d were renamed, none was deleted",
                self.root,
                num_renamed,
            )
        return None

    def _named(self, found: Path) -> Path:
        is_own = self._is_own(found)
        try:
            for directory in steps_alone(found).values() or [found]:
                with reading(directory):
                    self._verify(directory)
            if is_own:
                _check_name(found, step=_step_in(found.name))
        except (IncompleteCheckpointError, DamagedCheckpointError) as error:
            advice = (
                " run.resume=auto renames damaged checkpoints and continues from the newest good one."
                if is_own
                else ""
            )
            raise type(error)(f"{error}{advice}") from error
        return found

    def _check_free(self, found: Path | None) -> None:
        """Make sure that no step which this run will save exists already.

        Found at the start, and not at the next save, when the steps up to it would be lost.
        """
        done = 0 if found is None else self._step_of(found)
        later = [path for step, path in step_entries(self.root).items() if step > done]
        if found is not None and self._is_own(found):
            for path in later:
                cause = f"run.resume names the earlier {found.name}"
                self._set_aside(path, "superseded", cause=cause)
        elif later:
            raise CheckpointError(
                f"{later[0]} exists, and this run, which continues after step {done}, would have to "
                "write it: choose another run.dir, or move its checkpoints away: "
                f"mv {self.root} {self.root}.old"
            )

    def _is_own(self, found: Path) -> bool:
        has_name = STEP_NAME.fullmatch(found.name) is not None
        return has_name and found.resolve().parent == self.root.resolve()

    def _step_of(self, found: Path) -> int:
        alone = self.step_alone(found)
        return read_manifest(found).step if alone is None else alone

    def _set_partials_aside(self) -> None:
        # The run folder is locked, so no process is still writing them.
        for path in leftovers(self.root):
            if (path / MARKER_NAME).is_file():
                self._set_aside(
                    path, "incomplete", cause="its run died while saving or deleting it"
                )

    def _set_aside(
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
        # The line names the directory already, and what to do is done.
        cause = cause.replace(f"{path}/", "").replace(f"{path} ", "it ")
        cause = cause.removesuffix(": load another step directory.")
        logger.warning("checkpoint %s is %s (%s): renamed to %s", path, reason, cause, renamed.name)

    def _delete_old(self) -> None:
        """Apply the retention settings; a failure to delete never fails a completed save."""
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
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.root, error)

    def _verify(self, directory: Path) -> None:
        self.verify(directory)
        self._verified.add(directory)

    def _verify_once(self, directory: Path) -> None:
        """Compare all content once in this process; later only sizes, which reads no file."""
        if directory in self._verified:
            verify(directory, with_content=False)
        else:
            self._verify(directory)

    def step_alone(self, directory: Path) -> int | None:
        """The step of engines that were saved alone; None where the trainer has its part in the checkpoint.

        Raises:
            CheckpointError: roles are of different steps.
        """
        steps = steps_alone(directory)
        return step_of(steps) if steps else None

    def read_state(self, directory: Path, *, phase: str) -> TrainerState:
        """The trainer's part of a step directory.

        Raises:
            CheckpointError: another phase made it.
        """
        path = directory / TRAINER_PART / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no {TRAINER_PART}/{STATE_FILE}, so it is no checkpoint of a run: "
                "resume from one of a run, or from what temper-migrate converted."
            )
        state = TrainerState.from_json(path.read_text())
        if state.phase != phase:
            raise CheckpointError(
                f"{directory} is a checkpoint of phase {state.phase}, and this is phase {phase}: resume from one of its own, or begin with "
                "actor.engine.model.path at the model directory that the other left."
            )
        return state

    def read_roles(self, directory: Path, *, roles: Mapping[str, ReadPart]) -> None:
        """Restore every role; of engines alone the reference is left as it begins, for it was never trained.

        Raises:
            CheckpointError: the checkpoint lacks a role that this run has.
        """
        alone = steps_alone(directory)
        for name, read in roles.items():
            if alone and name == "ref":
                continue
            part = alone[name] / ENGINE_PART if name in alone else directory / name
            if not part.is_dir():
                raise CheckpointError(
                    f"{directory} holds no {name}, which this configuration has: resume with the run's own configuration."
                )
            with reading(part.parent):
                read(str(part))


def describe_deletion(checkpointer: Checkpointer) -> str | None:
    """Return a warning if the next save deletes more checkpoints than the one it replaces, or None."""
    root, kept, every = checkpointer.root, checkpointer.max_to_keep, checkpointer.keep_every
    if kept is None:
        return None
    own = [
        step
        for step in complete_steps(root)
        if _run_of(step_directory(root, step)) == checkpointer.run_id
    ]
    # The next save is among the newest ones that are kept.
    deleted = [
        step for step in own[: max(0, len(own) + 1 - kept)] if not (every and step % every == 0)
    ]
    if len(deleted) < 2:
        return None
    return (
        f"warning: the next save deletes {len(deleted)} older checkpoints in {root}, because "
        f"run.max_ckpt_to_keep is {kept}: raise it to keep them."
    )


def _run_of(directory: Path) -> str | None:
    try:
        return read_manifest(directory).info.run_id
    except CheckpointError:  # left alone by retention
        return ""


def describe_last_save(root: Path, *, warm_start: Path | None = None) -> str:
    """Return which step a run can be resumed from, for the message of its failure.

    Args:
        root: folder of the run's step directories.
        warm_start: that of its warm start, if it has one.
    """
    for folder, prefix in ((root, ""), (warm_start, "warm start: ")):
        for step in reversed([] if folder is None else complete_steps(folder)):
            directory = step_directory(folder or root, step)
            try:
                verify(directory, with_content=False)
            except CheckpointError:  # resuming will set it aside and take the one before
                continue
            return f"{prefix}step {step} is saved in {directory}: continue with run.resume=auto."
    return "No checkpoint of this run was saved yet: run.resume=auto would begin at step 1."


def load_run_id(folder: Path) -> str:
    """Return the identity of the run in a folder; created at its first start."""
    path = folder / RUN_ID_FILE
    run_id = path.read_text().strip() if path.exists() else ""
    if not run_id:
        run_id = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, f"{run_id}\n")
    return run_id


def _check_name(directory: Path, *, step: int) -> None:
    held = read_manifest(directory).step
    if held != step:
        raise DamagedCheckpointError(f"its manifest is of step {held}")


def _step_in(name: str) -> int:
    match = STEP_NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
