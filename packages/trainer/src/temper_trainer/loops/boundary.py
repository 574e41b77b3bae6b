"""What the driver does between two steps, in every loop: lock, report, and when to save."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from temper_trainer.config.run import RunConfig
from temper_trainer.loops.folder import RunFolder
from temper_trainer.loops.interrupts import RunInterrupted, StopRequest
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.run_lock import RunLock


@dataclass(slots=True, kw_only=True)
class StepBoundary:
    """The boundary between two steps of a run; one for all of its phases.

    Saving is decided here and not by the ranks, so that all of them save the same step, on a
    monotonic clock, so that a corrected system time neither skips nor repeats a save.
    """

    run: RunConfig
    folder: RunFolder
    lock: RunLock
    log: RunLog
    now: Callable[[], float] = time.monotonic
    saved_step: int = 0
    """The last step that is on disk; 0 if there is none."""
    checkpoint: Path | None = None
    """The checkpoint of that step."""
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.now()

    def end_step(self) -> None:
        """Note that a step was completed and logged.

        Raises:
            RunLockLostError: If another process has taken over the run folder.
        """
        self.lock.check()
        self.folder.mark_trained()
        self.log.refresh_report()

    def is_save_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether the state after this step is to be saved now.

        Args:
            step: The step that was completed.
            is_last: Whether the run ends here, as planned or because it was asked to stop.
        """
        run = self.run
        is_time = (
            run.save_interval_s is not None and self.now() - self._saved_at >= run.save_interval_s
        )
        return is_last or is_time or (run.save_every > 0 and step % run.save_every == 0)

    def set_saved(self, step: int, checkpoint: Path | None) -> None:
        """Note what a phase (warm start, RL, ...) begins from, or a save that was made.

        The next interval begins now, at the end of the save: a slow disk does not save all the time.
        """
        self.saved_step, self.checkpoint = step, checkpoint
        self._saved_at = self.now()

    def interrupted(self, stop: StopRequest) -> RunInterrupted:
        """Return the error that ends a run which was asked to stop."""
        return RunInterrupted(step=self.saved_step, checkpoint=self.checkpoint, stop=stop)
