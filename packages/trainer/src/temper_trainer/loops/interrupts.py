"""Ctrl-C: the first one lets the step finish and a checkpoint be written, the second one stops at once."""

import logging
import signal
import threading
from types import FrameType

from temper_engine_api.errors import TemperError

logger = logging.getLogger(__name__)


class RunInterrupted(TemperError):
    """The run was stopped from outside after a complete step; its checkpoint is saved."""

    def __init__(self, *, step: int, checkpoint: str) -> None:
        super().__init__(f"interrupted after step {step}; its checkpoint is {checkpoint}. Go on with run.resume=auto.")
        self.step = step
        self.checkpoint = checkpoint


class StopRequest:
    """A context in which SIGINT and SIGTERM set a flag once, and act as usual the second time."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: dict[signal.Signals, signal.Handlers | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.getsignal(number)  # type: ignore[assignment]
                signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        self._restore()
        logger.warning("stopping after this step (signal %d); once more stops at once and loses the step", number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
