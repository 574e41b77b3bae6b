"""The driver's work after each step of any loop: check the lock, report, decide on a save."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from temper_trainer.config.run import RunConfig
from temper_trainer.loops.run.interrupts import RunInterrupted, StopRequest
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.run_lock import RunLock


@dataclass(slots=True, kw_only=True)
class StepBoundary:
    """Bookkeeping between two steps; one object for all phases in a run.

    The driver decides when to save, so that all ranks save the same step.
    """

    run: RunConfig
    folder: RunFolder
    lock: RunLock
    log: RunLog
    now: Callable[[], float] = time.monotonic
    """Clock in seconds. Monotonic: a changed system time must neither skip nor repeat a save."""
    saved_step: int = 0
    """The last saved step; 0 if there is none."""
    checkpoint: Path | None = None
    """The checkpoint of that step."""
    has_completed_step: bool = field(default=False, init=False)
    """True once this process has completed a step of any phase."""
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.now()

    def end_step(self) -> None:
        """Record that a step was completed and logged.

        Raises:
            RunLockLostError: If another process has taken over the run folder.
        """
        self.lock.check()
        self.has_completed_step = True
        self.folder.mark_used()
        self.log.refresh_report()

    def is_save_due(self, step: int, *, is_last: bool) -> bool:
        """Return True if the state after a completed step must be saved.

        Args:
            step: The completed step.
            is_last: True if the run ends here, as planned or because of a stop request.
        """
        run = self.run
        is_interval_over = (
            run.save_interval_s is not None and self.now() - self._saved_at >= run.save_interval_s
        )
        return is_last or is_interval_over or (run.save_every > 0 and step % run.save_every == 0)

    def set_saved(self, step: int, checkpoint: Path | None) -> None:
        """Record a save, or the checkpoint that a phase starts from."""
        self.saved_step, self.checkpoint = step, checkpoint
        # The next interval starts when the save ends: with a slow disk, a run would otherwise
        # spend all its time saving.
        self._saved_at = self.now()

    def make_interrupted(self, stop: StopRequest) -> RunInterrupted:
        """Return the error that ends a run after a stop request; later signals have no effect."""
        return stop.make_interrupted(step=self.saved_step, checkpoint=self.checkpoint)
