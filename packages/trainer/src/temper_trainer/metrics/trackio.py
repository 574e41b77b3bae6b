"""Tracker ``trackio``: an extra of temper-trainer."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from temper_engine_api.errors import ConfigError
from temper_trainer.metrics.records import read_rows
from temper_trainer.metrics.settings import read_settings

PROJECT = "temper"


class _Run(Protocol):
    """What is used of trackio's run."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class TrackioTracker:
    """One run of trackio's project ``temper``, where trackio keeps its projects; the metrics of a phase are ``PHASE/NAME``.

    A resumed run that does steps again begins another run of trackio's, ``NAME.again-1``, with the rows that stay; the one before is left.
    """

    def __init__(self, directory: Path, *, is_superseded: bool) -> None:
        try:
            import trackio  # an extra
        except ImportError as error:
            raise ConfigError(
                "run.trackers names trackio, which is not installed: pip install 'temper-trainer[trackio]', or take it out of run.trackers."
            ) from error
        self._trackio = trackio
        self._directory = directory
        self._settings = read_settings(directory)
        self._name_file = directory / "trackio_run.txt"
        self._run: _Run | None = None
        if self._name_file.exists():
            self._name = self._name_file.read_text(encoding="utf-8").strip()
            self._run = self._open()
        else:
            # The number tells run folders of one name apart, because trackio goes by names.
            self._name = f"{directory.resolve().name}-{secrets.token_hex(4)}"
        if self._run is None or is_superseded:
            self.begin_anew()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Send one row."""
        assert self._run is not None
        self._run.log({f"{phase}/{name}": value for name, value in metrics.items()}, step=step)

    def begin_anew(self) -> None:
        """Another run, with the rows that stay."""
        if self._run is not None:
            self._run.finish()
            name, _, number = self._name.partition(".again-")
            self._name = f"{name}.again-{int(number or 0) + 1}"
        self._run = self._open()
        path = self._directory / "metrics.jsonl"
        for row in read_rows(path) if path.exists() else []:
            self.log(row.step, row.values, phase=row.phase)
        self._name_file.write_text(f"{self._name}\n", encoding="utf-8")

    def close(self, *, has_failed: bool) -> None:
        """Finish the run, and wait until everything is written."""
        assert self._run is not None
        self._run.finish()

    def _open(self) -> "_Run":
        made: _Run = self._trackio.init(
            project=PROJECT,
            name=self._name,
            resume="allow",
            config=self._settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return made
