"""A run's open sockets are those that SECURITY.md lists."""

import importlib.util
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.distributed.rendezvous import get_run_token
from temper_trainer.loops import RunResult

from .listeners_for_tests import Listeners, Row, rows

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the sockets of a process"
)

Run = Callable[..., RunResult]
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=2",
    "sampling.max_tokens=12",
    "run.progress=false",
)


def test_run_in_one_process_opens_only_the_listed_sockets_and_shows_no_token(
    run: Run, tmp_path: Path
) -> None:
    with Listeners() as listeners:
        run(tmp_path / "run", *SHORT_RUN)
    listeners.check(rows(run="inline"))
    listeners.check_secret(get_run_token(), folder=tmp_path)


def test_unlisted_socket_is_found() -> None:
    with Listeners() as listeners, socket.create_server(("0.0.0.0", 0)) as open_to_all:
        assert listeners.wait_for(open_to_all)
    with pytest.raises(
        AssertionError, match=r"driver has 1 sockets \(loopback: False\), SECURITY\.md lists 0"
    ):
        listeners.check([])
    with pytest.raises(AssertionError, match="which no process opened"):
        listeners.check(
            [
                Row(process="driver", most=1, is_on_loopback=False),
                Row(process="other", most=1, is_on_loopback=True),
            ]
        )


@pytest.mark.ray
# Nightly: starts Ray. The run in one process is checked above every day.
@pytest.mark.nightly
def test_run_on_ray_opens_only_the_listed_sockets_and_shows_no_token(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install './packages/trainer[ray]'")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    with Listeners() as listeners:
        run(
            tmp_path / "run",
            *SHORT_RUN,
            "runtime.kind=ray",
            "runtime.cpus_per_worker=0.5",
            "actor.num_workers=2",
        )
    listeners.check(rows(run="ray"))
    listeners.check_secret(get_run_token(), folder=tmp_path)
