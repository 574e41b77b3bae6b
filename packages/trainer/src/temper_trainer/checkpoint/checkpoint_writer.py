"""Write checkpoints, either while the run waits or in the background while the next steps run.

At most one save is in progress. The driver commits a background save between two steps, after all
roles have written their parts. At the latest it does so before it logs the next saved step. So a
crash loses at most the save in progress, and the one before it is complete.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import CheckpointTransaction, PartReport
from temper_engine_api.errors import TemperError
from temper_trainer.checkpoint.checkpointer import Checkpointer, abort_on_error
from temper_trainer.checkpoint.trainer_state import TrainerState

logger = logging.getLogger(__name__)


class SavedRole(Protocol):
    """The methods of a role (`WorkerGroup`) that a save needs."""

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks; recorded in the manifest."""

    def require(self, capability: Capability, /) -> None:
        """Raise CapabilityError if the engine lacks the capability."""

    def write_part(self, directory: str, /) -> Sequence[PartReport]:
        """Write the files on all ranks."""

    def stage_part(self, directory: str, /) -> None:
        """Copy the state on all ranks and write it in the background."""

    def has_written_part(self) -> bool:
        """Return True if every rank has written its files."""

    def finish_part(self) -> Sequence[PartReport]:
        """Wait until every rank has written its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingSave:
    """A save that roles are writing in the background."""

    transaction: CheckpointTransaction
    state: TrainerState


class CheckpointWriter:
    """Writes the checkpoints for one phase of a run.

    As a context it waits for the save in progress, also if the body raises an Exception. It does
    not wait after KeyboardInterrupt and the like, which must end the process at once.
    """

    def __init__(
        self, checkpointer: Checkpointer, *, roles: Mapping[str, SavedRole], in_background: bool
    ) -> None:
        """Check that all engines can save in the background, if that is enabled.

        Raises:
            CapabilityError: If an engine cannot.
        """
        self._checkpointer = checkpointer
        self._roles = roles
        self._in_background = in_background
        self._pending: _PendingSave | None = None
        if in_background:
            for role in roles.values():
                role.require(Capability.BACKGROUND_SAVE)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            try:
                self.wait()
            except TemperError as save_error:
                # Logged, not raised: it must not hide the error that ended the run.
                logger.error("the save in progress failed, too: %s", save_error)

    def save(self, state: TrainerState, *, wait: bool) -> Path:
        """Save a step; first wait for the previous save.

        Args:
            state: The trainer's part.
            wait: Return only when the step is committed. Always the case if the run does not save
                in the background.

        Returns:
            The step directory, which exists once the save is committed.

        Raises:
            CheckpointError: If this save or the previous one failed. Other steps are untouched.
        """
        self.wait()
        if wait or not self._in_background:
            writers = {name: role.write_part for name, role in self._roles.items()}
            return self._checkpointer.save(state, roles=writers, topology=self._topology)
        transaction = self._checkpointer.begin(state.step)
        with abort_on_error(transaction):
            for name, role in self._roles.items():
                role.stage_part(str(transaction.open_part(name)))
        self._pending = _PendingSave(transaction=transaction, state=state)
        return transaction.final

    def commit_before_log(self, *, is_save_due: bool) -> None:
        """Commit the save in progress; called between a step and its line in the log.

        Args:
            is_save_due: Wait for the save, because the completed step is saved next. Otherwise it
                is only committed if all roles have written it.

        Raises:
            CheckpointError: If the save failed.
        """
        # The loop logs the step between this call and `save`. If `save` waited instead, a run that
        # is killed during the wait would have to repeat this logged step, too. With save_every=1 a
        # killed run thus repeats one logged step at most.
        if is_save_due or (
            self._pending is not None
            and all(role.has_written_part() for role in self._roles.values())
        ):
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress and commit it.

        Raises:
            CheckpointError: If the save failed.
        """
        if self._pending is None:
            return
        # Cleared first: if the save fails, a later `wait`, such as in `__exit__`, must not finish
        # it a second time.
        pending, self._pending = self._pending, None
        with abort_on_error(pending.transaction):
            parts = {name: role.finish_part() for name, role in self._roles.items()}
            self._checkpointer.commit(
                pending.transaction, state=pending.state, parts=parts, topology=self._topology
            )

    @property
    def _topology(self) -> dict[str, int]:
        return {f"{name}.dp": role.dp_size for name, role in self._roles.items()}
