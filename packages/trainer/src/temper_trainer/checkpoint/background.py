"""When a run saves: at once, or copied at once and written while the next steps run, at most one save at a time.

The driver commits a save that was written between two steps, so that a crash loses that one at most; the step before it is always there.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport, Transaction
from temper_engine_api.errors import TemperError
from temper_trainer.checkpoint.save import Checkpointer, guarded
from temper_trainer.checkpoint.state import TrainerState

logger = logging.getLogger(__name__)


class SavedRole(Protocol):
    """What is used of a role."""

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, for the manifest."""

    def require(self, capability: Capability, /) -> None:
        """Refuse what its engine does not offer."""

    def write_part(self, directory: str, /) -> Sequence[PartReport]:
        """Write every rank's files."""

    def stage_part(self, directory: str, /) -> None:
        """Copy every rank's state, and write it while the role goes on."""

    def has_written_part(self) -> bool:
        """Whether every rank has written it."""

    def finish_part(self) -> Sequence[PartReport]:
        """Wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A save that roles are writing."""

    transaction: Transaction
    state: TrainerState


class Saves:
    """The saves of one run; as a context it waits for the one that is under way, also after an error, but not when told to stop at once."""

    def __init__(
        self, checkpointer: Checkpointer, *, roles: Mapping[str, SavedRole], in_background: bool
    ) -> None:
        """Raises CapabilityError where a role's engine can't save in the background and is asked to."""
        self._checkpointer = checkpointer
        self._roles = roles
        self._in_background = in_background
        self._pending: _Pending | None = None
        self.last_step: int | None = None
        """Of the last save that was begun here."""
        if in_background:
            for role in roles.values():
                role.require(Capability.BACKGROUND_SAVE)

    def __enter__(self) -> "Saves":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            try:
                self.finish()
            except TemperError as second:  # the first one is what the run ends with
                logger.error("the save that was under way is lost too: %s", second)

    def save(self, state: TrainerState, *, waits: bool) -> Path:
        """Save now; the step directory, committed if ``waits`` or if this run does not save in the background.

        Raises:
            CheckpointError: this save or the one before it failed; the other steps are untouched.
        """
        self.finish()
        self.last_step = state.step
        if waits or not self._in_background:
            writers = {name: role.write_part for name, role in self._roles.items()}
            return self._checkpointer.save(state, roles=writers, topology=self._topology)
        transaction = self._checkpointer.begin(state.step)
        with guarded(transaction):
            for name, role in self._roles.items():
                role.stage_part(str(transaction.part(name)))
        self._pending = _Pending(transaction=transaction, state=state)
        return transaction.final

    def settle(self) -> None:
        """Commit what has been written meanwhile, without waiting; to be called between steps.

        Raises:
            CheckpointError: the save failed.
        """
        if self._pending is not None and all(
            role.has_written_part() for role in self._roles.values()
        ):
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way and commit it.

        Raises:
            CheckpointError: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with guarded(pending.transaction):
            parts = {name: role.finish_part() for name, role in self._roles.items()}
            self._checkpointer.commit(
                pending.transaction, state=pending.state, parts=parts, topology=self._topology
            )

    @property
    def _topology(self) -> dict[str, int]:
        return {f"{name}.dp": role.dp_size for name, role in self._roles.items()}
