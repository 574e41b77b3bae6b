"""Tracker ``mlflow``: an extra of temper-trainer."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TypeVar

from temper_engine_api.errors import ConfigError
from temper_trainer.metrics.records import Row, read_rows
from temper_trainer.metrics.settings import read_settings

T = TypeVar("T")
EXPERIMENT = "temper"
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 6000
"""Of one call, and of a parameter's value: MLflow's own limits."""


class MlflowTracker:
    """One MLflow run of experiment ``temper``, with the settings as parameters; the metrics of a phase are ``PHASE/NAME``.

    Where MLFLOW_TRACKING_URI is not set, it lies in ``mlflow.db`` in the run folder. MLflow can take no point back: a resumed run that does
    steps again, or has other settings, begins another MLflow run with the rows that stay, and the one before is marked as superseded.
    """

    def __init__(self, directory: Path, *, is_superseded: bool) -> None:
        try:
            import mlflow  # an extra
        except ImportError as error:
            raise ConfigError(
                "run.trackers names mlflow, which is not installed: pip install 'temper-trainer[mlflow]', or take it out of run.trackers."
            ) from error
        self._entities = mlflow.entities
        uri = (
            mlflow.get_tracking_uri()
            if mlflow.is_tracking_uri_set()
            else f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        )
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._directory = directory
        self._id_file = directory / "mlflow_run.txt"
        self._settings = {key: _written(value) for key, value in read_settings(directory).items()}
        self._run_id = (
            self._id_file.read_text(encoding="utf-8").strip() if self._id_file.exists() else None
        )
        if (
            self._run_id is None
            or is_superseded
            or self._client.get_run(self._run_id).data.params != self._settings
        ):
            self.begin_anew()
        else:
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Send the numbers of one step."""
        self._send([Row(step=step, phase=phase, time_s=time.time(), values=metrics)])

    def begin_anew(self) -> None:
        """Another run, with the rows that stay."""
        before, self._run_id = self._run_id, self._create()
        self._send(
            read_rows(self._directory / "metrics.jsonl")
            if (self._directory / "metrics.jsonl").exists()
            else []
        )
        if before is not None:
            self._client.set_tag(before, "temper.superseded_by", self._run_id)
            self._client.set_terminated(before, status="KILLED")
        self._id_file.write_text(self._run_id, encoding="utf-8")

    def close(self, *, has_failed: bool) -> None:
        """Say how the run has ended."""
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")

    def _create(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = (
            self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        )
        run_id: str = self._client.create_run(
            experiment, run_name=self._directory.resolve().name
        ).info.run_id
        params = (self._entities.Param(key, value) for key, value in self._settings.items())
        for some in _in_parts(params, _MOST_PARAMS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def _send(self, rows: Iterable[Row]) -> None:
        points = (
            self._entities.Metric(f"{row.phase}/{name}", value, round(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        )
        for some in _in_parts(points, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)


def _written(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LONGEST]


def _in_parts(things: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(things)
    while part := list(islice(left, size)):
        yield part
