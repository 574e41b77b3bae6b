"""Background saves: at most one at a time, on a thread; its error is kept until `finish`."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from temper_engine_api.checkpoint.part_files import PartReport, report_part, write_json
from temper_engine_api.errors import EngineStateError
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

PROGRESS_FILE = "progress.json"
"""File with an engine's counters, in its folder of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEngine:
    """Copy of an engine's state at the time of a save, for `save_engine_checkpoint`."""

    config: EngineConfig
    topology: Topology
    write: Callable[[str], list[str]]
    """Writes the copied state to a directory and returns relative paths of this rank's files.
    Collective over the saving threads."""
    progress: Mapping[str, object]
    """Counters of the engine."""

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files. Collective."""
        files = self.write(directory)
        if self.topology.global_rank == 0:
            files = [*files, write_json(directory, PROGRESS_FILE, self.progress)]
        return report_part(directory, files)

    def read_part(self, directory: str) -> None:
        """Raise EngineStateError: a copy can only be written."""
        raise EngineStateError(
            f"{directory} can't be read into the copy of an engine that is being saved."
        )


class BackgroundSave(Generic[ResultT]):
    """A save on a thread. The thread is not a daemon, so the process waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: ResultT | None = None
        self._error: BaseException | None = None

    @property
    def is_pending(self) -> bool:
        """True if a save was started and not finished with `finish`."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        """True if the save has ended, with or without an error."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, action: Callable[[], ResultT], *, goal: Path) -> None:
        """Start a save; the previous one must have been finished.

        Args:
            action: Function that saves.
            goal: Path of the checkpoint, for the log and the name of the thread.
        """
        assert self._thread is None, "the save before was not finished"

        def run() -> None:
            try:
                self._result = action()
            except BaseException as error:  # noqa: BLE001  (raised again by finish, on the thread that asks)
                logger.error("saving %s in the background failed: %s", goal, error)
                self._error = error

        self._result = self._error = None
        self._thread = threading.Thread(target=run, name=f"saving {goal.name}")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save has ended; keep its result or error for `finish`."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> ResultT | None:
        """Wait for the save and return its result, or raise its error; None if none was started."""
        self.wait()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result
