"""Checkpoints of a whole run: every role writes its part, the trainer its state, and one commit makes them a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.checkpoint import (
    ENGINE_PART,
    ManifestInfo,
    PartReport,
    Transaction,
    begin,
    last_complete_step,
    package_versions,
    prune,
    report_part,
    step_directory,
    verify,
)
from temper_engine_api.errors import CheckpointError, DamagedCheckpointError
from temper_trainer.checkpoint.alone import step_of, steps_alone
from temper_trainer.checkpoint.state import TrainerState

STATE_FILE = "state.json"
TRAINER_PART = "trainer"
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
    """The checkpoints of one run folder."""

    root: Path
    """Folder of step directories."""
    max_to_keep: int | None
    """Complete steps to keep; None keeps all."""

    def save(self, state: TrainerState, *, roles: Mapping[str, WritePart], topology: Mapping[str, int]) -> Path:
        """One transaction; on any error the earlier steps are untouched and only our own staging directory is removed.

        Args:
            state: the trainer's part.
            roles: how each role writes its part.
            topology: sizes by role, for the manifest.

        Raises:
            CheckpointError: the disk is full or a file can't be written.
        """
        transaction = begin(self.root, state.step)
        with guarded(transaction):
            return self.commit(
                transaction,
                state=state,
                parts={name: write(str(transaction.part(name))) for name, write in roles.items()},
                topology=topology,
            )

    def commit(
        self, transaction: Transaction, *, state: TrainerState, parts: Mapping[str, Sequence[PartReport]], topology: Mapping[str, int]
    ) -> Path:
        """Add the trainer's part to those that the roles have written, make them a step, and remove the steps beyond those to keep."""
        info = ManifestInfo(topology=topology, config_hash=state.config_digest, packages=package_versions())
        own = transaction.part(TRAINER_PART)
        (own / STATE_FILE).write_text(state.to_json())
        committed = transaction.commit({**parts, TRAINER_PART: [report_part(own, [STATE_FILE])]}, info=info)
        if self.max_to_keep is not None:
            prune(self.root, max_to_keep=self.max_to_keep)
        return committed

    def find(self, resume: str) -> Path | None:
        """What ``run.resume`` means: nothing, the last complete step directory, or the one it names (or engines' own), verified.

        Raises:
            CheckpointError: it names no complete step directory, or one of this run that later steps follow.
            DamagedCheckpointError: a file is missing or its checksum differs.
        """
        if resume == "never":
            return None
        if resume == "auto":
            step = last_complete_step(self.root)
            if step is None:
                return None
            found = step_directory(self.root, step)
        else:
            found = Path(resume)
            self._check_is_last(found)
        try:
            for directory in steps_alone(found).values() or [found]:
                verify(directory)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error} To go on from an earlier complete step, name its directory: run.resume={self.root}/step_..."
            ) from error
        return found

    def _check_is_last(self, found: Path) -> None:
        last = last_complete_step(self.root)
        if last is not None and found.resolve().parent == self.root.resolve() and found.name < step_directory(self.root, last).name:
            raise CheckpointError(
                f"{found} is followed by {step_directory(self.root, last)}, which going on from it would have to overwrite: move the "
                "later steps away, or choose another run.dir."
            )

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
        state = TrainerState.from_json((directory / TRAINER_PART / STATE_FILE).read_text())
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
            read(str(part))
