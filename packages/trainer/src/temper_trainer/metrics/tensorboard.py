"""Tracker ``tensorboard``: event files, one run per phase, so that the same metric of two phases can be laid over each other."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes ``tensorboard/PHASE/``; events of steps that a resumed run does again are purged by TensorBoard itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Add one scalar per metric."""
        if phase not in self._writers:
            self._writers[phase] = SummaryWriter(str(self._directory / phase), purge_step=step)
        for name, value in metrics.items():
            self._writers[phase].add_scalar(name, value, global_step=step)

    def begin_anew(self) -> None:
        """Each phase's events are purged from its next step on."""

    def close(self, *, has_failed: bool) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()
