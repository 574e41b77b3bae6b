"""A save that goes on while training does: at most one, on a thread of its own, whose failure is kept until somebody asks."""

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
"""What an engine counts, in its part of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEngine:
    """An engine as it was when a save was asked for; a participant of ``save_engine_checkpoint``."""

    config: EngineConfig
    """Its configuration."""
    topology: Topology
    """Where this rank stands."""
    write: Callable[[str], list[str]]
    """Writes the copy of its state below a directory; relative paths of this rank's files. Collective over ranks' threads."""
    progress: Mapping[str, object]
    """What it counted."""

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files. Collective."""
        files = self.write(directory)
        if self.topology.global_rank == 0:
            files = [*files, write_json(directory, PROGRESS_FILE, self.progress)]
        return report_part(directory, files)

    def read_part(self, directory: str) -> None:
        """A copy is never read into."""
        raise EngineStateError(
            f"{directory} can't be read into the copy of an engine that is being saved."
        )


class BackgroundSave(Generic[ResultT]):
    """The one save that may be running. Python waits for it before the process ends by itself."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: ResultT | None = None
        self._error: BaseException | None = None

    @property
    def is_pending(self) -> bool:
        """Whether one was started that nobody has asked about."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, action: Callable[[], ResultT], *, goal: Path) -> None:
        """Begin; the one before must have been finished."""
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
        """Wait for it, and leave what came of it to ``finish``."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> ResultT | None:
        """Wait for it; what it came to, or its error raised; None where none was started."""
        self.wait()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result
