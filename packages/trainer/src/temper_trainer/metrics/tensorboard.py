"""Tracker ``tensorboard``: event files, one run per phase, so that the same metric of two phases can be laid over each other."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from temper_trainer.metrics.records import Phase


class TensorBoardTracker:
    """Writes ``tensorboard/PHASE/``; events of steps that a resumed run does again are purged by TensorBoard itself."""

    def __init__(self, directory: Path, *, resume_step: int | None) -> None:
        self._directory = directory / "tensorboard"
        self._resume_step = resume_step
        self._writers: dict[Phase, SummaryWriter] = {}

    def log(self, step: int, metrics: Mapping[str, float], *, phase: Phase) -> None:
        """Add one scalar per metric."""
        writer = self._writer(phase)
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step=step, new_style=True)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, phase: Phase) -> SummaryWriter:
        if phase not in self._writers:
            purge_step = None if self._resume_step is None or phase == "warm_start" else self._resume_step + 1
            self._writers[phase] = SummaryWriter(str(self._directory / phase), purge_step=purge_step)
        return self._writers[phase]
