"""Trackers, which record the metrics for each step (``run.trackers``).

``open_tracker`` makes one by name. Packages of optional trackers are imported in the constructors,
so that a run needs only the packages of its own trackers.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.metrics.run_files import METRICS_FILE, Row, read_rows, read_settings, to_json

T = TypeVar("T")
PROJECT = "temper"
"""Name of the project (wandb, trackio) or experiment (MLflow)."""
_MLFLOW_MAX_METRICS, _MLFLOW_MAX_PARAMS, _MLFLOW_MAX_LENGTH = 1000, 100, 6000
"""MLflow's limits: metrics and parameters in one call, characters of a parameter's value."""


class Tracker(Protocol):
    """Receives a run's metrics."""

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Record the metrics for one step in a phase."""

    def on_rewind(self) -> None:
        """Prepare for steps that were logged before and are logged again.

        ``metrics.jsonl`` already contains only the rows that are still valid.
        """

    def close(self, *, has_failed: bool) -> None:
        """Write out buffered data.

        Args:
            has_failed: True if the run ended with an error.
        """


def open_tracker(name: str, directory: Path, *, is_superseded: bool) -> Tracker:
    """Make the tracker with this name.

    Args:
        name: ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow`` or ``trackio``.
        directory: The run folder.
        is_superseded: True if steps that an earlier process logged will be logged again.

    Raises:
        ConfigError: If the tracker's package is not installed.
    """
    match name:
        case "jsonl":
            return JsonlTracker(directory)
        case "tensorboard":
            return TensorBoardTracker(directory)
        case "wandb":
            return WandbTracker(directory)
        case "mlflow":
            return MlflowTracker(directory, is_superseded=is_superseded)
        case "trackio":
            return TrackioTracker(directory, is_superseded=is_superseded)
    raise AssertionError(f"{name!r} is not a tracker")


def _missing_package(name: str) -> ConfigError:
    return ConfigError(
        f"run.trackers names {name}, which is not installed: run "
        f"{format_install(f'temper-trainer[{name}]')}, or remove it from run.trackers."
    )


class JsonlTracker:
    """Appends one JSON object per step to ``metrics.jsonl``.

    The file is closed after each line, so other programs can follow it and a crash loses nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        row = Row(step=step, phase=phase, time_s=time.time(), values=metrics)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")

    def on_rewind(self) -> None:
        """Do nothing: `RunLog` has moved the superseded rows itself."""

    def close(self, *, has_failed: bool) -> None:
        """Do nothing: the file is not kept open."""


class TensorBoardTracker:
    """Writes event files to ``tensorboard/PHASE/``.

    One TensorBoard run per phase lets the same metric of two phases be overlaid. TensorBoard itself
    discards events of steps that are logged again.
    """

    def __init__(self, directory: Path) -> None:
        # Imports torch, which `temper-train --check` does without.
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self._directory = directory / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        if phase not in self._writers:
            self._writers[phase] = self._make_writer(str(self._directory / phase), purge_step=step)
        for name, value in metrics.items():
            self._writers[phase].add_scalar(name, value, global_step=step)

    def on_rewind(self) -> None:
        """Do nothing: `purge_step` discards the old events when a phase logs its next step."""

    def close(self, *, has_failed: bool) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """Logs to one wandb run, named after the run folder; a resumed run continues it."""

    def __init__(self, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing_package("wandb") from error
        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            # Our own id, known before `init`, so that a resumed run finds it in the run folder.
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        run_id = id_file.read_text(encoding="utf-8").strip()
        self._run = wandb.init(
            project=PROJECT, name=directory.name, dir=str(directory), id=run_id, resume="allow"
        )
        self._phases: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        # wandb has a single step counter that only increases. Each phase gets its own x axis.
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log(
            {f"{phase}/step": step} | {f"{phase}/{name}": value for name, value in metrics.items()}
        )

    def on_rewind(self) -> None:
        """Do nothing: wandb cannot delete history, so repeated steps appear twice."""

    def close(self, *, has_failed: bool) -> None:
        """Finish the run and wait for the upload."""
        self._run.finish(exit_code=int(has_failed))


class TrackioTracker:
    """Logs to a run of trackio's project ``temper``; metrics are named ``PHASE/NAME``.

    If steps are repeated after a resume, a new trackio run ``NAME.again-N`` starts with the rows
    that are still valid, and the previous run is kept.
    """

    def __init__(self, directory: Path, *, is_superseded: bool) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing_package("trackio") from error
        self._trackio = trackio
        self._directory = directory
        self._settings = read_settings(directory)
        self._name_file = directory / "trackio_run.txt"
        self._run: Any = None
        if self._name_file.exists():
            self._name = self._name_file.read_text(encoding="utf-8").strip()
            self._run = self._open()
        else:
            # trackio identifies runs by name, and two run folders may have the same name.
            self._name = f"{directory.resolve().name}-{secrets.token_hex(4)}"
        if self._run is None or is_superseded:
            self.on_rewind()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        self._run.log({f"{phase}/{name}": value for name, value in metrics.items()}, step=step)

    def on_rewind(self) -> None:
        """Start another trackio run with the rows that are still valid."""
        if self._run is not None:
            self._run.finish()
            name, _, number = self._name.partition(".again-")
            self._name = f"{name}.again-{int(number or 0) + 1}"
        self._run = self._open()
        path = self._directory / METRICS_FILE
        for row in read_rows(path) if path.exists() else []:
            self.log(row.step, row.values, phase=row.phase)
        # After the rows: if copying them fails, the file still names the previous run.
        self._name_file.write_text(f"{self._name}\n", encoding="utf-8")

    def close(self, *, has_failed: bool) -> None:
        """Finish the run and wait until everything is written."""
        self._run.finish()

    def _open(self) -> Any:
        return self._trackio.init(
            project=PROJECT,
            name=self._name,
            resume="allow",
            config=self._settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MlflowTracker:
    """Logs to an MLflow run of experiment ``temper``; metrics are named ``PHASE/NAME``.

    The settings of the run become MLflow parameters. Without MLFLOW_TRACKING_URI the data is in
    ``mlflow.db`` in the run folder. MLflow can neither delete a point nor change a parameter. So a
    resumed run that repeats steps or has different settings starts a new MLflow run with the valid
    rows, and marks the previous MLflow run as superseded.
    """

    def __init__(self, directory: Path, *, is_superseded: bool) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _missing_package("mlflow") from error
        self._entities = mlflow.entities
        uri = (
            mlflow.get_tracking_uri()
            if mlflow.is_tracking_uri_set()
            else f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        )
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._directory = directory
        self._id_file = directory / "mlflow_run.txt"
        self._params = {key: _to_param(value) for key, value in read_settings(directory).items()}
        self._run_id = (
            self._id_file.read_text(encoding="utf-8").strip() if self._id_file.exists() else None
        )
        if (
            self._run_id is None
            or is_superseded
            or self._client.get_run(self._run_id).data.params != self._params
        ):
            self.on_rewind()
        else:
            # The previous process has set a final status, unless it was killed.
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        self._send([Row(step=step, phase=phase, time_s=time.time(), values=metrics)])

    def on_rewind(self) -> None:
        """Start another MLflow run with the rows that are still valid."""
        previous, self._run_id = self._run_id, self._create_run()
        path = self._directory / METRICS_FILE
        self._send(read_rows(path) if path.exists() else [])
        if previous is not None:
            self._client.set_tag(previous, "temper.superseded_by", self._run_id)
            self._client.set_terminated(previous, status="KILLED")
        # Last, so that the file never names an MLflow run that lacks the earlier rows.
        self._id_file.write_text(self._run_id, encoding="utf-8")

    def close(self, *, has_failed: bool) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")

    def _create_run(self) -> str:
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = (
            self._client.create_experiment(PROJECT)
            if experiment is None
            else experiment.experiment_id
        )
        run_id: str = self._client.create_run(
            experiment_id, run_name=self._directory.resolve().name
        ).info.run_id
        params = (self._entities.Param(key, value) for key, value in self._params.items())
        for chunk in _split_chunks(params, _MLFLOW_MAX_PARAMS):
            self._client.log_batch(run_id, params=chunk)
        return run_id

    def _send(self, rows: Iterable[Row]) -> None:
        points = (
            # The row's time and not the time now, in milliseconds: earlier rows may be sent
            # again.
            self._entities.Metric(f"{row.phase}/{name}", value, round(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        )
        for chunk in _split_chunks(points, _MLFLOW_MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=chunk)


def _to_param(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_MLFLOW_MAX_LENGTH]


def _split_chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk
