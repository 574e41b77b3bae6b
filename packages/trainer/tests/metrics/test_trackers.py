"""Third-party trackers with their real clients on local files, and Prometheus over HTTP."""

import io
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from temper_engine_api.distributed.rendezvous import get_run_token
from temper_engine_api.errors import ConfigError
from temper_trainer.metrics import prometheus
from temper_trainer.metrics.run_log import RunLog

# Raised between the dependencies of the trackers' clients.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
MLFLOW = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="needs mlflow: pip install './packages/trainer[mlflow]'"
)
TRACKIO = pytest.mark.skipif(
    find_spec("trackio") is None, reason="needs trackio: pip install './packages/trainer[trackio]'"
)
PROMETHEUS = pytest.mark.skipif(
    find_spec("prometheus_client") is None,
    reason="needs prometheus_client: pip install './packages/trainer[prometheus]'",
)
SETTINGS = {
    "run": {"total_steps": 4, "trackers": ["jsonl"]},
    "actor": {"engine": {"optimizer": {"lr": 1e-3}}},
    "critic": None,
}


def open_log(
    directory: Path, tracker: str, *, resume_step: int | None = None, port: int | None = None
) -> RunLog:
    directory.mkdir(exist_ok=True)
    trackers = ["jsonl", tracker] if tracker else ["jsonl"]
    console = Console(file=io.StringIO())
    return RunLog(
        directory,
        trackers=trackers,
        progress=False,
        resume_step=resume_step,
        prometheus_port=port,
        console=console,
    )


def write_settings(directory: Path, **run: object) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(
        yaml.safe_dump({**SETTINGS, "run": {**SETTINGS["run"], **run}})
    )  # type: ignore[dict-item]


def log_steps(log: RunLog, steps: Sequence[int], *, phase: str = "rl", plus: float = 0.0) -> None:
    for step in steps:
        log.log_metrics(step, {"actor/loss": step / 2 + plus}, phase=phase)


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_missing_tracker_package_is_a_configuration_error(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, tracker, None)
    with pytest.raises(
        ConfigError,
        match=(
            rf"run\.trackers names {tracker}, which is not installed: run pip install "
            rf"'\./packages/trainer\[{tracker}\]' in a clone"
        ),
    ):
        open_log(tmp_path, tracker)


def test_missing_prometheus_client_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(
        ConfigError,
        match=r"client is not installed: run pip install './packages/trainer\[prometheus\]' in a",
    ):
        open_log(tmp_path, "", port=9)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow needs seconds to create a database, so the tests copy this one."""
    import mlflow

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    assert (
        mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment_by_name("temper")
        is None
    )
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A run folder with an empty MLflow database."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path


class Store:
    """Reads back an MLflow database."""

    def __init__(self, directory: Path) -> None:
        import mlflow

        self.client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
        self.current = (directory / "mlflow_run.txt").read_text()

    def runs(self) -> list[Any]:
        (experiment,) = [e for e in self.client.search_experiments() if e.name == "temper"]
        return list(
            self.client.search_runs(
                [experiment.experiment_id], order_by=["attributes.start_time ASC"]
            )
        )

    def points(self, run_id: str, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.client.get_metric_history(run_id, key)]


@MLFLOW
def test_mlflow_has_each_point_once_and_the_settings_after_a_resume(tmp_path: Path) -> None:
    write_settings(tmp_path)
    with open_log(tmp_path, "mlflow") as log:
        log_steps(log, [1, 2], phase="warm_start")
        log_steps(log, [1, 2, 3])
    first = Store(tmp_path).current
    with open_log(tmp_path, "mlflow", resume_step=1) as log:
        log_steps(log, [2, 3], plus=10.0)
    store = Store(tmp_path)
    assert [run.info.run_id for run in store.runs()] == [first, store.current]
    before, now = (store.client.get_run(run_id) for run_id in (first, store.current))
    assert store.points(store.current, "rl/actor/loss") == [(1, 0.5), (2, 11.0), (3, 11.5)]
    assert store.points(store.current, "warm_start/actor/loss") == [(1, 0.5), (2, 1.0)]
    assert store.points(first, "rl/actor/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (before.info.status, before.data.tags["temper.superseded_by"]) == (
        "KILLED",
        store.current,
    )
    assert now.info.status == "FINISHED"
    assert now.info.run_name == tmp_path.name
    expected = {
        "run.total_steps": "4",
        "run.trackers": '["jsonl"]',
        "actor.engine.optimizer.lr": "0.001",
        "critic": "null",
    }
    assert before.data.params == now.data.params == expected


@MLFLOW
def test_resume_without_repeated_steps_continues_the_same_mlflow_run(folder: Path) -> None:
    write_settings(folder)
    for resume_step, steps in ((None, [1, 2]), (2, [3, 4])):
        with open_log(folder, "mlflow", resume_step=resume_step) as log:
            log_steps(log, steps)
    store = Store(folder)
    assert [run.info.run_id for run in store.runs()] == [store.current]
    assert store.points(store.current, "rl/actor/loss") == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


@MLFLOW
def test_resume_with_other_settings_starts_an_mlflow_run_with_all_points(
    folder: Path,
) -> None:
    for resume_step, steps, total in ((None, [1, 2], 2), (2, [3], 3)):
        write_settings(folder, total_steps=total)
        with open_log(folder, "mlflow", resume_step=resume_step) as log:
            log_steps(log, steps)
    store = Store(folder)
    assert [run.data.params["run.total_steps"] for run in store.runs()] == ["2", "3"]
    assert store.points(store.current, "rl/actor/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]


@MLFLOW
def test_repeated_warm_start_is_superseded_in_mlflow(folder: Path) -> None:
    write_settings(folder)
    with open_log(folder, "mlflow") as log, log.progress_bar("warm_start", total=3):
        log_steps(log, [1, 2], phase="warm_start")
    with open_log(folder, "mlflow") as log, log.progress_bar("warm_start", total=3, start=1):
        log_steps(log, [2, 3], phase="warm_start", plus=10.0)
    store = Store(folder)
    assert store.points(store.current, "warm_start/actor/loss") == [(1, 0.5), (2, 11.0), (3, 11.5)]


@MLFLOW
def test_mlflow_records_failure_and_nan(folder: Path) -> None:
    def fail() -> None:
        with open_log(folder, "mlflow") as log:
            log.log_metrics(1, {"actor/loss": math.nan}, phase="rl")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    store = Store(folder)
    assert store.client.get_run(store.current).info.status == "FAILED"
    ((step, value),) = store.points(store.current, "rl/actor/loss")
    assert step == 1
    assert math.isnan(value)


@MLFLOW
def test_settings_and_points_beyond_the_limits_of_one_mlflow_call(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        yaml.safe_dump({f"key{i}": "x" * 7000 if i == 3 else i for i in range(230)})
    )
    with open_log(folder, "") as log:
        for step in range(1, 4):
            log.log_metrics(step, {f"a/m{i}": float(i) for i in range(400)}, phase="rl")
    with open_log(folder, "mlflow", resume_step=3) as log:
        log_steps(log, [4])
    store = Store(folder)
    params = store.client.get_run(store.current).data.params
    assert (len(params), params["key3"]) == (230, "x" * 6000)
    assert all(
        store.points(store.current, f"rl/a/m{i}") == [(step, float(i)) for step in (1, 2, 3)]
        for i in (0, 250, 399)
    )


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder for trackio's projects."""
    from trackio import sqlite_storage, utils

    root = tmp_path / "trackio"
    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", root)
    return root


def trackio_rows(name: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    return [
        (row["step"], row["rl/actor/loss"])
        for row in SQLiteStorage.get_logs("temper", name)
        if "rl/actor/loss" in row
    ]


@TRACKIO
def test_trackio_has_each_row_once_and_the_settings_after_a_resume(
    tmp_path: Path, projects: Path
) -> None:
    import trackio

    run = tmp_path / "run"
    write_settings(run)
    with open_log(run, "trackio") as log:
        log_steps(log, [1, 2], phase="warm_start")
        log_steps(log, [1, 2])
    with open_log(run, "trackio", resume_step=2) as log:
        log_steps(log, [3])
    first = (run / "trackio_run.txt").read_text().strip()
    assert re.fullmatch(r"run-[0-9a-f]{8}", first)
    assert trackio_rows(first) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    with open_log(run, "trackio", resume_step=1) as log:
        log_steps(log, [2, 3], plus=10.0)
    again = (run / "trackio_run.txt").read_text().strip()
    assert again == f"{first}.again-1"
    assert trackio_rows(again) == [(1, 0.5), (2, 11.0), (3, 11.5)]
    assert trackio_rows(first) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (projects / "temper.db").exists()
    kept = {each.name: each.config for each in trackio.Api().runs("temper")}
    assert kept.keys() == {first, again}
    assert all(
        config is not None and config["actor.engine.optimizer.lr"] == 1e-3
        for config in kept.values()
    )


@TRACKIO
def test_trackio_distinguishes_run_folders_of_the_same_name(tmp_path: Path, projects: Path) -> None:
    for folder_name in ("one", "other"):
        (tmp_path / folder_name).mkdir()
        with open_log(tmp_path / folder_name / "run", "trackio") as log:
            log_steps(log, [1])
    names = {
        (tmp_path / folder_name / "run" / "trackio_run.txt").read_text().strip()
        for folder_name in ("one", "other")
    }
    assert len(names) == 2
    assert all(trackio_rows(name) == [(1, 0.5)] for name in names)


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port: int = probe.getsockname()[1]
    return free_port


def scrape(port: int, *, token: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def read_token(directory: Path) -> str:
    return (directory / "prometheus_token").read_text()


@PROMETHEUS
def test_prometheus_serves_the_latest_values_and_their_step(tmp_path: Path, port: int) -> None:
    with open_log(tmp_path, "", port=port) as log:
        log_steps(log, [1, 2])
        log.log_metrics(
            2, {"eval/greedy/reward": math.nan, "a/b_c": 1.0, "a_b/c": 2.0}, phase="eval"
        )
        token = read_token(tmp_path)
        text = scrape(port, token=token)
    assert 'temper_actor_loss{metric="actor/loss",phase="rl"} 1.0\n' in text
    assert 'temper_step{phase="rl"} 2.0\n' in text
    assert 'temper_eval_greedy_reward{metric="eval/greedy/reward",phase="eval"} NaN\n' in text
    assert 'temper_a_b_c{metric="a/b_c",phase="eval"} 1.0\n' in text
    assert 'temper_a_b_c{metric="a_b/c",phase="eval"} 2.0\n' in text
    with pytest.raises(OSError, match="refused"):
        scrape(port, token=token)
    with open_log(tmp_path, "", port=port, resume_step=2) as log:
        log_steps(log, [3])
        assert 'temper_step{phase="rl"} 3.0\n' in scrape(port, token=read_token(tmp_path))


@PROMETHEUS
def test_prometheus_serves_the_time_of_the_last_step(tmp_path: Path, port: int) -> None:
    def last_step_time(phase: str) -> float:
        (line,) = (
            row
            for row in scrape(port, token=read_token(tmp_path)).splitlines()
            if row.startswith(f'temper_step_timestamp_seconds{{phase="{phase}"}}')
        )
        return float(line.split()[-1])

    before = time.time()
    with open_log(tmp_path, "", port=port) as log:
        assert before <= last_step_time("start") <= time.time()
        log_steps(log, [1])
        first = last_step_time("rl")
        log_steps(log, [2])
        assert before <= first < last_step_time("rl") <= time.time()


@PROMETHEUS
@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}]
)
def test_prometheus_refuses_requests_without_the_token(
    tmp_path: Path, port: int, header: dict[str, str]
) -> None:
    with open_log(tmp_path, "", port=port) as log:
        log_steps(log, [1])
        with pytest.raises(urllib.error.HTTPError, match="401") as refusal:
            urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=header),
                timeout=10,
            )
        assert b"temper_" not in refusal.value.read()
        refusal.value.close()


@PROMETHEUS
def test_prometheus_token_is_private_and_differs_from_the_token_of_the_run(
    tmp_path: Path, port: int
) -> None:
    (tmp_path / "prometheus_token").write_text("old")
    with open_log(tmp_path, "", port=port):
        assert (tmp_path / "prometheus_token").stat().st_mode & 0o777 == 0o600
        assert read_token(tmp_path) not in ("old", get_run_token())
    assert not (tmp_path / "prometheus_token").exists()


@PROMETHEUS
def test_prometheus_listens_only_on_loopback(tmp_path: Path, port: int) -> None:
    with open_log(tmp_path, "", port=port), socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.2", port))  # fails if the server listens on all addresses


@PROMETHEUS
def test_silent_connections_neither_stop_prometheus_nor_take_threads_and_descriptors(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 1.0)
    # In another process, so that the descriptors counted here are those of the server.
    program = f"""
import socket, time
silent = []
for _ in range(300):
    silent.append(socket.socket())
    silent[-1].setblocking(False)
    silent[-1].connect_ex(("127.0.0.1", {port}))
    time.sleep(0.001)
print("connected", flush=True)
time.sleep(600)
"""
    with open_log(tmp_path, "", port=port) as log:
        log_steps(log, [1])
        num_threads, num_open = threading.active_count(), len(os.listdir("/proc/self/fd"))
        stranger = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "connected\n"
            limit = prometheus.MAX_CONNECTIONS + 2  # and the pipe of the stranger, and the listing
            assert threading.active_count() - num_threads <= prometheus.MAX_CONNECTIONS
            assert len(os.listdir("/proc/self/fd")) - num_open <= limit
            assert 'temper_step{phase="rl"} 1.0\n' in scrape(port, token=read_token(tmp_path))
            time.sleep(2)
            assert threading.active_count() <= num_threads
        finally:
            stranger.kill()
            stranger.communicate()
    assert capfd.readouterr().err == ""


@PROMETHEUS
def test_request_of_single_bytes_is_dropped_at_the_deadline(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 1.0)
    begin = time.monotonic()

    def send_slowly(connection: socket.socket) -> None:
        while time.monotonic() - begin < 10:
            connection.send(b"G")
            time.sleep(0.2)

    with (
        open_log(tmp_path, "", port=port),
        socket.create_connection(("127.0.0.1", port)) as slow,
        pytest.raises(OSError, match=r"reset|Broken pipe"),
    ):
        send_slowly(slow)
    assert time.monotonic() - begin < 5
    assert capfd.readouterr().err == ""


@PROMETHEUS
def test_port_in_use_is_a_configuration_error(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=(
                rf"run\.prometheus_port is {port}, which can't be opened on "
                rf"run\.prometheus_address 127\.0\.0\.1: Address already in use"
            ),
        ):
            open_log(tmp_path, "", port=port)
